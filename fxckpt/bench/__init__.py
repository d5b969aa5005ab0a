"""Bench: one training step, run in several ways, compared in memory, time and gradients."""

from fxckpt.bench.result import BenchResult, VariantResult
from fxckpt.bench.run import run_bench

__all__ = ["BenchResult", "VariantResult", "run_bench"]
