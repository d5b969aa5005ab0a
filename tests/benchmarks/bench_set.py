"""The fixed bench set: eight architectures, each trained in several ways, through ``fxckpt.bench``.

    python -m tests.benchmarks.bench_set --out results                # all; resumes where it stopped
    python -m tests.benchmarks.bench_set --out results --only llama,bert
    python -m tests.benchmarks.bench_set --out results --write-docs   # docs/benchmarks.md from what is in results
    python -m tests.benchmarks.bench_set --sizes                      # one eager step of each: time and memory

Sizes are chosen so that an eager step takes 0.5 to 3 s on two cores and activations are most of the memory. All rates
of dropout are 0, so that the gradients of all variants can be compared.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fxckpt.bench.run import run_bench
from fxckpt.bench.step import TrainingStep
from fxckpt.models.load import load
from fxckpt.models.spec import ModelSpec
from fxckpt.show.tables import bytes_text, flops_text, seconds_text, spread_text

DOCS = Path(__file__).resolve().parent.parent.parent / "docs" / "benchmarks.md"
COMMAND = "python -m tests.benchmarks.bench_set"
VARIANTS = (
    "eager,hf-eager@1,hf-eager@2,compile,hf-compile@1,hf-compile@2,torch-budget@0.5,"
    "fxckpt-plain@1,fxckpt@1,fxckpt@2,fxckpt@1+offload"
)
DECODER = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}
SPECS: dict[str, ModelSpec] = {
    "llama": ModelSpec("llama", batch=4, seq=1024, overrides=DECODER),
    "qwen3": ModelSpec("qwen3", batch=4, seq=1024, overrides={**DECODER, "head_dim": 32}),
    "gpt2": ModelSpec(
        "gpt2",
        batch=4,
        seq=1024,
        overrides={
            "vocab_size": 1024,
            "n_embd": 256,
            "n_layer": 8,
            "n_head": 8,
            "n_positions": 1024,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
    ),
    "bert": ModelSpec(
        "bert",
        batch=8,
        seq=512,
        overrides={
            "vocab_size": 1024,
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
        },
    ),
    "t5": ModelSpec(
        "t5",
        batch=4,
        seq=512,
        overrides={
            "vocab_size": 1024,
            "d_model": 256,
            "d_kv": 32,
            "d_ff": 1024,
            "num_layers": 4,
            "num_decoder_layers": 4,
            "num_heads": 8,
        },
    ),
    "vit": ModelSpec(
        "vit",
        batch=16,
        overrides={
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "image_size": 224,
            "patch_size": 16,
        },
    ),
    "mixtral": ModelSpec(
        "mixtral",
        batch=4,
        seq=512,
        overrides={
            **DECODER,
            "num_hidden_layers": 6,
            "intermediate_size": 512,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "whisper": ModelSpec(
        "whisper",
        batch=4,
        seq=256,
        overrides={
            "vocab_size": 1024,
            "d_model": 256,
            "encoder_layers": 4,
            "decoder_layers": 4,
            "encoder_attention_heads": 8,
            "decoder_attention_heads": 8,
            "encoder_ffn_dim": 1024,
            "decoder_ffn_dim": 1024,
            "max_source_positions": 750,
            "max_target_positions": 256,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 1,
            "decoder_start_token_id": 2,
        },
    ),
}
RATIOS: tuple[tuple[str, str, str, str], ...] = tuple(
    (f"{ours} {what} / {peer} {what}", ours, peer, key)
    for ours, peer, what, key in (
        ("fxckpt@1", "hf-eager@1", "peak", "peak_bytes"),
        ("fxckpt@2", "hf-eager@2", "peak", "peak_bytes"),
        ("fxckpt@1", "hf-compile@1", "peak", "peak_bytes"),
        ("fxckpt@2", "hf-compile@2", "peak", "peak_bytes"),
        ("fxckpt@1", "hf-compile@1", "time", "seconds"),
        ("fxckpt@2", "hf-compile@2", "time", "seconds"),
    )
)


GPU = """
## On a GPU

Not measured yet: no GPU was at hand. `python -m tests.gpu.check --json gpu.json` takes some minutes on one and prints
the table for this place: correctness, the share of the copies that computation hides, peak and step time at 8k to 32k
tokens. The disk tier on a CPU is measured in [correctness](correctness.md#transfers).
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="folder of a JSON file for each model")
    parser.add_argument("--only", default=",".join(SPECS), help="models, with commas between")
    parser.add_argument("--variants", default=VARIANTS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--write-docs", action="store_true", help="measure nothing; write docs/benchmarks.md")
    parser.add_argument("--sizes", action="store_true", help="one eager step of each model in this process")
    options = parser.parse_args()
    names = options.only.split(",")
    unknown = [name for name in names if name not in SPECS]
    if unknown:
        parser.error(f"no such model: {', '.join(unknown)}; there are: {', '.join(SPECS)}")
    if options.write_docs:
        DOCS.write_text(page(read(options.out)), encoding="utf-8")
    elif options.sizes:
        sizes(names)
    else:
        options.out.mkdir(parents=True, exist_ok=True)
        for name in names:
            measure(name, options.out / f"{name}.json", options)


def measure(name: str, file: Path, options: argparse.Namespace) -> None:
    """One model into its file, unless it is there already."""
    if file.exists():
        print(f"{name}: {file} is there already", flush=True)
        return

    def say(done: int, total: int, text: str) -> None:
        print(f"{name} {done}/{total} {text}", flush=True)

    result = run_bench(
        SPECS[name], options.variants.split(","), rounds=options.rounds, threads=options.threads, on_progress=say
    )
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(result.to_dict(), indent=1) + "\n", encoding="utf-8")
    partial.rename(file)
    for failed in result.failed:
        print(f"{name}: {failed.variant} failed: {failed.error}", flush=True)


def sizes(names: list[str]) -> None:
    print("model | seconds of an eager step | peak | held for backward | parameters")
    for name in names:
        model, batch = load(SPECS[name])
        step = TrainingStep(model, model, batch, seed=0)
        step.timed()
        seconds = min(step.timed() for _ in range(2))
        held, peak = step.memory()
        parameters = sum(p.numel() * p.element_size() for p in model.parameters())
        shown = (bytes_text(n) for n in (peak, held, parameters))
        print(name, f"{seconds:.2f}", *shown, sep=" | ", flush=True)


# ---- docs/benchmarks.md -----------------------------------------------------------------------------------------


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """The results there are, by model."""
    files = {name: folder / f"{name}.json" for name in SPECS}
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.exists()}


HEAD = f"""\
# Benchmarks

One training step, forward and backward without an optimizer, of eight architectures at sizes where activations are most
of the memory, run in several ways. This page is written by the second command from what the first one measured:

    {COMMAND} --out bench-results
    {COMMAND} --out bench-results --write-docs

Every variant runs in a process of its own, with the same weights, batch and random state, and all dropout rates 0.
Steps are timed in turn: in each round every variant does one step while the others wait, in an order drawn anew. The
[reference](reference.md#command-line) says what variants and columns are. Any model of yours can be compared in
the same way with `fxckpt bench`.
"""


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """docs/benchmarks.md."""
    lines = [HEAD.rstrip(), *_measured_with(results)]
    if not results:
        return "\n".join([*lines, "", "Not measured yet."]) + "\n"
    lines += ["", "## Ratios", "", "The geometric mean over the models where both ran; below 1, fxckpt needs less.", ""]
    lines += ["| ratio | geometric mean | models | smallest | largest |", "|---|---|---|---|---|"]
    lines += [_ratio_row(results, *ratio) for ratio in RATIOS]
    for name, result in results.items():
        lines += ["", f"## {name}", "", *_model(result)]
    return "\n".join(lines) + "\n" + GPU


def _measured_with(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = []
    for machine, names in _grouped(results, lambda r: _machine(r)).items():
        of = "" if len(names) == len(results) else f" ({', '.join(names)})"
        lines += ["", f"Measured with{of}: {machine}."]
    return lines


def _grouped(results: Mapping[str, Mapping[str, Any]], key: Callable[[Mapping[str, Any]], str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name, result in results.items():
        groups.setdefault(key(result), []).append(name)
    return groups


def _machine(result: Mapping[str, Any]) -> str:
    m, s = result["machine"], result["settings"]
    return (
        f"{m['device']}, {m['threads']} threads of {m['cores']} cores; PyTorch {m['torch']}, transformers "
        f"{m['transformers']}, fxckpt {m['fxckpt']}, Python {m['python']}; {s['rounds']} rounds; "
        f"peak from {s['peak']}; {s['date']}"
    )


def ratios(results: Mapping[str, Mapping[str, Any]], ours: str, peer: str, key: str) -> list[float]:
    """A figure of `ours` relative to that of `peer`, for each model where both ran.

    Times are compared round by round, as those of one round lie close together.
    """
    found = []
    for result in results.values():
        rows = {v["variant"]: v for v in result["variants"] if v["error"] is None}
        if ours not in rows or peer not in rows:
            continue
        if key == "seconds":
            pairs = zip(rows[ours]["round_seconds"], rows[peer]["round_seconds"], strict=False)
            rounds = sorted(a / b for a, b in pairs)
            if rounds:
                found.append((rounds[(len(rounds) - 1) // 2] + rounds[len(rounds) // 2]) / 2)
        elif rows[ours][key] and rows[peer][key]:
            found.append(rows[ours][key] / rows[peer][key])
    return found


def _ratio_row(results: Mapping[str, Mapping[str, Any]], title: str, ours: str, peer: str, key: str) -> str:
    found = ratios(results, ours, peer, key)
    if not found:
        return f"| {title} | - | 0 | - | - |"
    mean = math.exp(sum(map(math.log, found)) / len(found))
    return f"| {title} | {mean:.3f} | {len(found)} | {min(found):.3f} | {max(found):.3f} |"


def _model(result: Mapping[str, Any]) -> list[str]:
    spec, model = result["spec"], result["model"]
    settings = ", ".join(f"`{key}={value}`" for key, value in spec["overrides"].items())
    shapes = ", ".join(f"`{key}` {'×'.join(map(str, shape))}" for key, shape in model["batch"].items())
    columns = ("peak", "held", "offloaded", "step", "quartiles", f"ratio to {result['baseline']}")
    columns += ("first step", "graphs", "FLOPs recomputed", "fxckpt's passes", "gradient difference")
    lines = [
        f"`{model['model']}`, {model['parameters'] / 1e6:.1f} M parameters ({bytes_text(model['parameter_bytes'])}), "
        f"{spec['dtype'] or 'fp32'}, {shapes}; {settings}. Bold: on the Pareto frontier of peak and step.",
        "",
        f"| variant | {' | '.join(columns)} |",
        f"|---{'|---' * len(columns)}|",
    ]
    failed = []
    for v in result["variants"]:
        name = f"**{v['variant']}**" if v["variant"] in result["frontier"] else v["variant"]
        lines.append(f"| {name} | {' | '.join(_cells(v))} |")
        if v["error"]:
            failed.append(f"- {v['variant']} failed: {v['error'][:300]}")
    return [*lines, "", *failed] if failed else lines


def _cells(v: Mapping[str, Any]) -> list[str]:
    def shown(key: str, text: Callable[[Any], str]) -> str:
        return "" if v[key] is None else text(v[key])

    passes = ""
    if v["pass_seconds"] is not None and v["pass_share"] is not None:
        passes = f"{seconds_text(v['pass_seconds'])} ({v['pass_share']:.1%})"
    return [
        "failed" if v["error"] else shown("peak_bytes", bytes_text),
        shown("held_bytes", bytes_text),
        shown("offloaded_bytes", bytes_text),
        shown("seconds", seconds_text),
        shown("spread", lambda s: spread_text(*s)),
        shown("ratio", lambda r: f"{r:.3f}"),
        shown("first_step_seconds", seconds_text),
        shown("graphs", str),
        shown("recomputed_flops", flops_text),
        passes,
        shown("gradient_difference", lambda d: f"{d:.1e}" if d else "0"),
    ]


if __name__ == "__main__":
    main()
