"""Bench: one training step, run in several ways, compared in memory, time and gradients."""

from fxckpt.bench.result import BenchResult, VariantResult
from fxckpt.bench.run import run_bench
from fxckpt.bench.spec import BenchSpec

__all__ = ["BenchResult", "BenchSpec", "VariantResult", "run_bench"]
