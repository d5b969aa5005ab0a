"""What only a GPU can show: one script, some minutes on one device, for docs/benchmarks.md.

    python -m tests.gpu.check --json gpu.json          # all
    python -m tests.gpu.check --only numbers,overlap   # parts
    python -m tests.gpu.check --device cpu --tiny      # does the script itself run

Parts:
    numbers    gradients with offload equal those without, bit for bit; host memory and disk, plain and compiled
    steps      memory of device and host is flat over steps, and after a step that was given up
    overlap    share of the copies' time during which kernels ran, from the profiler's trace
    figures    peak and step time of a Llama-like stack in bf16, against no offload and Hugging Face's own switches
    graphs     what mode="reduce-overhead" says
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import fxckpt
from fxckpt.bench.step import gradient_difference

MIB = 2**20
Batch = dict[str, torch.Tensor]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model and short sequences")
    options = parser.parse_args()
    check = Check(options.device, options.tiny)
    results: dict[str, Any] = {"facts": check.facts()}
    for name in options.only.split(","):
        start = time.perf_counter()
        try:
            results[name] = PARTS[name](check)
        except Exception as error:
            traceback.print_exc()
            results[name] = {"failed": f"{type(error).__name__}: {error}"}
        print(f"{name}: {time.perf_counter() - start:.0f} s {json.dumps(results[name])[:2000]}", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=1))
    if "figures" in results and "rows" in results["figures"]:
        Console(width=160).print(table(results["figures"]["rows"]))
    return int(any("failed" in r for r in results.values()))


class Check:
    """Where and how large."""

    def __init__(self, device: str, tiny: bool) -> None:
        self.device, self.tiny = torch.device(device), tiny
        self.dtype = torch.bfloat16

    def facts(self) -> dict[str, Any]:
        cuda = self.device.type == "cuda"
        return {
            "date": datetime.date.today().isoformat(),
            "device": torch.cuda.get_device_name(self.device) if cuda else "cpu",
            "torch": torch.__version__,
            "fxckpt": fxckpt.__version__,
        }

    def llama(self, seq: int, layers: int = 4) -> tuple[nn.Module, Batch]:
        """Layers as wide as those of an 8B model, and a short vocabulary."""
        from transformers import LlamaConfig, LlamaForCausalLM

        wide = not self.tiny
        config = LlamaConfig(
            vocab_size=8192 if wide else 256,
            hidden_size=4096 if wide else 64,
            intermediate_size=14336 if wide else 172,
            num_hidden_layers=layers,
            num_attention_heads=32 if wide else 4,
            num_key_value_heads=8 if wide else 2,
            max_position_embeddings=seq,
            use_cache=False,
        )
        torch.manual_seed(0)
        with torch.device(self.device):
            model = LlamaForCausalLM(config).to(self.dtype).train()
            ids = torch.randint(config.vocab_size, (1, seq))
        return model, {"input_ids": ids, "labels": ids}

    def sequences(self) -> list[int]:
        return [8192, 16384, 32768] if not self.tiny else [64, 128]

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def step(self, run: Callable[..., Any], model: nn.Module, batch: Batch) -> float:
        """Seconds of a step; gradients start from nothing."""
        model.zero_grad(set_to_none=True)
        self.wait()
        start = time.perf_counter()
        run(**batch).loss.backward()
        self.wait()
        return time.perf_counter() - start

    def peak(self, run: Callable[..., Any], model: nn.Module, batch: Batch) -> int:
        """Bytes of a step's peak over what was there before it; gradients included."""
        model.zero_grad(set_to_none=True)
        gc.collect()
        if self.device.type != "cuda":
            self.step(run, model, batch)
            return 0
        base = self.allocated()
        torch.cuda.reset_peak_memory_stats(self.device)
        self.step(run, model, batch)
        return torch.cuda.max_memory_allocated(self.device) - base


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.detach().cpu() for n, p in model.named_parameters() if p.grad is not None}


def fresh() -> None:
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- parts --------------------------------------------------------------------------------------------------------


def numbers(check: Check) -> dict[str, Any]:
    """Largest relative difference of a gradient, and whether all are bit for bit equal."""
    found: dict[str, Any] = {}
    seq = check.sequences()[0]
    for compiled in (False, True):
        model, batch = check.llama(seq)
        wanted: dict[str, torch.Tensor] = {}
        for place in (False, "cpu", "disk"):
            fresh()
            t = fxckpt.transform(model, offload=place, verify=True)
            run: Any = torch.compile(t) if compiled else t
            for _ in range(3):
                check.step(run, model, batch)
            got = gradients(model)
            wanted = wanted or got
            equal = all(torch.equal(got[n], wanted[n]) for n in wanted)
            stats = fxckpt.stats(t)
            found[f"{'compiled' if compiled else 'plain'} {place}"] = {
                "equal": equal,
                "difference": gradient_difference(got, wanted)[0],
                "offloaded": stats.offloaded_bytes,
            }
            if not equal:
                found["failed"] = f"{place}: gradients differ"
    return found


def steps(check: Check) -> dict[str, Any]:
    """Memory before and after many steps, and after steps whose backward never comes."""
    fresh()
    model, batch = check.llama(check.sequences()[0] // 4)
    t = fxckpt.transform(model, offload=True)

    def levels() -> dict[str, int]:
        model.zero_grad(set_to_none=True)
        gc.collect()
        check.wait()
        cuda = check.device.type == "cuda"
        stats = torch.cuda.host_memory_stats() if cuda and hasattr(torch.cuda, "host_memory_stats") else {}
        return {"device": check.allocated(), "host": int(stats.get("allocated_bytes.current", 0))}

    for _ in range(3):
        check.step(t, model, batch)
    before = levels()
    for _ in range(100):
        check.step(t, model, batch)
        t(**batch)  # given up
    after = levels()
    found: dict[str, Any] = {"before": before, "after": after, "pool": fxckpt.stats(t).host_bytes}
    if before != after:
        found["failed"] = "memory grew"
    return found


def overlap(check: Check) -> dict[str, Any]:
    """From the trace of a compiled step: seconds of copies between host and device, and how much of it was hidden."""
    fresh()
    model, batch = check.llama(check.sequences()[0])
    t = fxckpt.transform(model, offload=True)
    run = torch.compile(t)
    for _ in range(3):
        check.step(run, model, batch)
    with torch.profiler.profile() as profile:
        check.step(run, model, batch)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = spans(events, lambda e: e.get("cat") == "kernel")
    copies = spans(events, lambda e: e.get("cat") == "gpu_memcpy" and ("DtoH" in e["name"] or "HtoD" in e["name"]))
    total = sum(b - a for a, b in copies)
    hidden = sum(max(0.0, min(b, d) - max(a, c)) for a, b in copies for c, d in merged(kernels))
    stats = fxckpt.stats(t)
    return {
        "copy_ms": total / 1000,
        "hidden": hidden / total if total else None,
        "stall_ms": stats.stall_seconds * 1000,
        "by_events_ms": (stats.offload_seconds + stats.reload_seconds) * 1000,
    }


def spans(events: list[dict[str, Any]], wanted: Callable[[dict[str, Any]], bool]) -> list[tuple[float, float]]:
    return sorted((e["ts"], e["ts"] + e["dur"]) for e in events if "dur" in e and wanted(e))


def merged(found: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Sorted spans without overlaps."""
    result: list[tuple[float, float]] = []
    for a, b in found:
        if result and a <= result[-1][1]:
            result[-1] = (result[-1][0], max(b, result[-1][1]))
        else:
            result.append((a, b))
    return result


def figures(check: Check) -> dict[str, Any]:
    """Peak and step time by sequence length; ratios are of steps in turns."""
    rows: list[dict[str, Any]] = []
    for number, seq in enumerate(check.sequences()):
        runs: dict[str, tuple[Any, nn.Module, Batch]] = {}
        variants = ["fxckpt@1", "fxckpt@1+offload"]
        if number == 0:
            variants += ["fxckpt@1+disk", "hf-compile@1", "hf-eager@1", "hf-eager@1+offload"]
        fresh()
        for variant in variants:
            model, batch = check.llama(seq)
            runs[variant] = (made(variant, model), model, batch)
        rows += measured(check, seq, runs)
    return {"rows": rows}


def made(variant: str, model: nn.Module) -> Any:
    kind, _, option = variant.partition("+")
    if kind == "fxckpt@1":
        place = {"": False, "offload": "cpu", "disk": "disk"}[option]
        return torch.compile(fxckpt.transform(model, offload=place))
    model.gradient_checkpointing_enable(every_n_layers=1, offload=bool(option))  # type: ignore[operator]
    return torch.compile(model) if kind == "hf-compile@1" else model


def measured(check: Check, seq: int, runs: dict[str, tuple[Any, nn.Module, Batch]]) -> list[dict[str, Any]]:
    rows, failed = {}, []
    for variant, (run, model, batch) in runs.items():
        row: dict[str, Any] = {"variant": variant, "tokens": seq}
        rows[variant] = row
        try:
            check.step(run, model, batch)
            check.step(run, model, batch)
            row["peak_mib"] = check.peak(run, model, batch) / MIB
            if variant.startswith("fxckpt") and "+" in variant:
                row["offloaded_mib"] = fxckpt.stats(run).offloaded_bytes / MIB
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
            failed.append(variant)
        model.zero_grad(set_to_none=True)
    times: dict[str, list[float]] = {v: [] for v in runs if v not in failed}
    for _ in range(5):
        for variant, taken in times.items():
            taken.append(check.step(*runs[variant]))
            runs[variant][1].zero_grad(set_to_none=True)
    base = times.get("fxckpt@1")
    for variant, taken in times.items():
        rows[variant]["step_ms"] = statistics.median(taken) * 1000
        if base:
            rows[variant]["ratio"] = statistics.median(a / b for a, b in zip(taken, base, strict=True))
    return list(rows.values())


def graphs(check: Check) -> dict[str, Any]:
    """Offload under CUDA graphs is refused, with words; without offload it works."""
    fresh()
    model, batch = check.llama(check.sequences()[0] // 4)
    found: dict[str, Any] = {}
    run = torch.compile(fxckpt.transform(model), mode="reduce-overhead")
    for _ in range(3):
        check.step(run, model, batch)
    fresh()
    try:
        check.step(torch.compile(fxckpt.transform(model, offload=True), mode="reduce-overhead"), model, batch)
        found["said"] = "nothing"
    except fxckpt.UnsupportedError as error:
        found["said"] = str(error)
    if check.device.type == "cuda" and found["said"] == "nothing":
        found["failed"] = "offload under CUDA graphs was not refused"
    return found


PARTS: dict[str, Callable[[Check], dict[str, Any]]] = {
    "numbers": numbers,
    "steps": steps,
    "overlap": overlap,
    "figures": figures,
    "graphs": graphs,
}


def table(rows: list[dict[str, Any]]) -> Table:
    """The figures as docs/benchmarks.md shows them."""
    made = Table("tokens", "variant", "peak", "offloaded", "step", "ratio to fxckpt@1")
    for row in rows:
        if "error" in row:
            made.add_row(str(row["tokens"]), row["variant"], row["error"])
            continue
        offloaded = f"{row['offloaded_mib']:.1f} MiB" if "offloaded_mib" in row else ""
        peak, step = f"{row['peak_mib']:.1f} MiB", f"{row['step_ms']:.1f} ms"
        made.add_row(str(row["tokens"]), row["variant"], peak, offloaded, step, f"{row.get('ratio', 0):.3f}")
    return made


if __name__ == "__main__":
    sys.exit(main())
