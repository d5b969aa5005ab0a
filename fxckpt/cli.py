"""The command ``fxckpt``: one command a function, each a thin front of its folder."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from fxckpt.bench.calibrate import calibrate as measure_device
from fxckpt.bench.calibrate import render_device
from fxckpt.bench.plot import check_plot, plot
from fxckpt.bench.run import run_bench
from fxckpt.bench.table import WIDTH, render
from fxckpt.bench.timeline import captured_variant, measure_timeline, plot_timeline, render_timeline
from fxckpt.bench.variants import known_variants
from fxckpt.config import Offload, Settings, make_settings
from fxckpt.decide.device import store_measured
from fxckpt.decide.plan import Plan
from fxckpt.errors import FxckptError, SettingsError
from fxckpt.models.load import load
from fxckpt.models.spec import ModelSpec, parse_overrides
from fxckpt.planning import target_of, with_optimizer
from fxckpt.predict.capture import Captures
from fxckpt.predict.explain import explain_step
from fxckpt.predict.report import make_report
from fxckpt.predict.sweep import make_sweep, plan_settings, usual_settings
from fxckpt.show.plan_tables import render_plan
from fxckpt.show.sweep import Sweep

DEFAULT_VARIANTS = "eager,hf-eager@1,compile,hf-compile@1,fxckpt@1,fxckpt@2"
VARIANTS_HELP = f"What to compare, comma-separated; ratios are relative to the first. There are: {known_variants()}."

Model = Annotated[
    str,
    typer.Argument(
        help="A transformers model type (llama, bert, t5, vit, whisper, ...), a folder with config.json, or "
        "file.py:function, a function that returns (model, batch) and may take batch, seq, dtype and device."
    ),
]
Batch = Annotated[int, typer.Option(help="Rows of the batch.")]
Seq = Annotated[int, typer.Option(help="Tokens of a row.")]
Dtype = Annotated[str | None, typer.Option(help="fp32, bf16 or fp16, of weights and inputs.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A field of the configuration; repeatable.")
]
Layers = Annotated[
    list[str] | None, typer.Option(help="Name pattern of fxckpt's boundary layers, for plain PyTorch; repeatable.")
]
Dropout = Annotated[str, typer.Option(help="on: as configured. off: all rates are 0.")]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the code beside config.json that it names; read it before.")
]
Planned = Annotated[str | None, typer.Argument(metavar="MODEL", help="As for bench, where no --config is given.")]
Config = Annotated[
    Path | None, typer.Option(help="A folder with config.json, or such a file. Code beside it is not run.")
]
EveryN = Annotated[int, typer.Option(help="Every n-th layer is recomputed.")]
ToHost = Annotated[bool, typer.Option("--offload", help="Boundary activations go to the host.")]
Compiled = Annotated[bool, typer.Option("--compiled", help="Plan for torch.compile(t).")]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback()
def _fxckpt() -> None:
    """Train PyTorch models in less memory, and see what that costs."""


@app.command()
def bench(
    model: Model,
    variants: Annotated[str, typer.Option(help=VARIANTS_HELP)] = DEFAULT_VARIANTS,
    batch: Batch = 2,
    seq: Seq = 128,
    dtype: Dtype = None,
    device: Device = "cpu",
    steps: Annotated[int, typer.Option(help="Timed steps of a variant in each round.")] = 1,
    rounds: Annotated[int, typer.Option(help="Rounds; in each, every variant has its turn.")] = 5,
    warmup: Annotated[int, typer.Option(help="Steps before the rounds, beside the first.")] = 2,
    threads: Annotated[int | None, typer.Option(help="Threads of PyTorch's kernels.")] = None,
    overrides: Overrides = None,
    layers: Layers = None,
    dropout: Dropout = "off",
    trust: Trust = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw memory against time (.png, .svg).")] = None,
) -> None:
    """Compare ways to run one training step: memory, time, compile time and gradients.

    Each variant runs in its own process, and they take turns step by step. Exits with 1 if a variant of fxckpt failed.
    """
    _check_files(json_file, plot_file)
    spec = _spec(model, batch, seq, dtype, device, overrides, layers, dropout, trust)
    with _Bar() as show:
        ways = variants.split(",")
        result = run_bench(spec, ways, steps=steps, rounds=rounds, warmup=warmup, threads=threads, on_progress=show)
    if json_file is not None:
        json_file.write_text(json.dumps(result.to_dict(), indent=2) + "\n", encoding="utf-8")
    if plot_file is not None:
        plot(result, plot_file)
    _print(render(result))
    if any(v.ours for v in result.failed):
        raise typer.Exit(1)


@app.command()
def timeline(
    model: Model,
    variants: Annotated[str, typer.Option(help="Ways to run the step that capture it, comma-separated.")] = "fxckpt@1",
    batch: Batch = 2,
    seq: Seq = 128,
    dtype: Dtype = None,
    device: Device = "cpu",
    overrides: Overrides = None,
    layers: Layers = None,
    dropout: Dropout = "off",
    trust: Trust = False,
    rows: Annotated[int, typer.Option(min=1, help="Values shown for each graph.")] = 16,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw the bytes over the steps.")] = None,
) -> None:
    """Show what is in memory at the peak of a captured training step: which values, of which layers, made where."""
    _check_files(json_file, plot_file)
    spec = _spec(model, batch, seq, dtype, device, overrides, layers, dropout, trust)
    ways = variants.split(",")
    for way in ways:  # a mistake is told before anything is compiled
        captured_variant(way)
    found = [measure_timeline(spec, way) for way in ways]
    if json_file is not None:
        json_file.write_text(json.dumps([t.to_dict() for t in found], indent=2) + "\n", encoding="utf-8")
    if plot_file is not None:
        plot_timeline(found, plot_file)
    for each in found:
        _print(render_timeline(each, rows))


@app.command()
def plan(
    model: Planned = None,
    config: Config = None,
    every_n: EveryN = 1,
    offload: ToHost = False,
    compiled: Compiled = False,
    batch: Batch = 1,
    seq: Seq = 128,
    dtype: Dtype = None,
    overrides: Overrides = None,
    layers: Layers = None,
    dropout: Dropout = "on",
    trust: Trust = False,
    save: Annotated[
        list[str] | None, typer.Option(help="What recomputed layers save all the same, such as attention.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Choose what to recompute: the peak's bytes, such as 24GiB.")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="Count what it keeps, too: adamw, sgd, or another one of torch.optim.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="What to predict the time for: cpu, cuda, or a GPU's whole name.")
    ] = None,
    side_by_side: Annotated[
        bool, typer.Option("--sweep", help="Plan the usual settings side by side, and those given.")
    ] = False,
    budgets: Annotated[
        int, typer.Option(min=0, help="With --sweep: so many budgets beside, from the smallest to keeping everything.")
    ] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the plan, or all, to this file.")] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", help="Write a page with pictures of the memory and of the settings.")
    ] = None,
) -> None:
    """Say what a training step will cost, without memory for its weights and activations.

    The file that --json writes is a plan that fxckpt.transform(model, plan=FILE) follows; with --sweep it has all of
    the plans.
    """
    _check_files(json_file, None, html_file)
    spec = _spec(_planned("plan", model, config), batch, seq, dtype, "cpu", overrides, layers, dropout, trust)
    settings = _settings(spec, every_n, offload, save, budget)
    if budgets and not (side_by_side or html_file is not None):
        raise SettingsError("--budgets goes with --sweep or --html.")
    with _Bar() as show:
        show(0, 1, f"capturing a step of {spec.model}")
        built, inputs = load(spec, shapes=True)
        settings = with_optimizer(settings, built, optimizer)
        captures, target = Captures(built, inputs), target_of(built, device, compiled)
        made: Plan | Sweep
        if html_file is not None:
            report = make_report(captures, settings, target, budgets=budgets, on_progress=show)
            made = report.sweep if side_by_side else report.plan
            html_file.write_text(report.html, encoding="utf-8")
        elif side_by_side:
            choices = [*usual_settings(settings, Offload()), settings]
            made = make_sweep(captures, choices, target, budgets=budgets, on_progress=show)
        else:
            made = plan_settings(captures, settings, target)
    if json_file is not None:
        json_file.write_text(made.to_json() + "\n", encoding="utf-8")
    _print(made if isinstance(made, Sweep) else render_plan(made))


@app.command()
def explain(
    model: Planned = None,
    config: Config = None,
    every_n: EveryN = 1,
    offload: ToHost = False,
    compiled: Compiled = False,
    batch: Batch = 1,
    seq: Seq = 128,
    dtype: Dtype = None,
    overrides: Overrides = None,
    layers: Layers = None,
    dropout: Dropout = "on",
    trust: Trust = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Show what a training step saves for backward: why, from which source line, and how many bytes.

    The step is captured without memory for its weights and activations; nothing is run.
    """
    _check_files(json_file, None)
    spec = _spec(_planned("explain", model, config), batch, seq, dtype, "cpu", overrides, layers, dropout, trust)
    settings = _settings(spec, every_n, offload)
    with _Bar() as show:
        show(0, 1, f"capturing a step of {spec.model}")
        built, inputs = load(spec, shapes=True)
        found = explain_step(built, inputs, settings, compiled=compiled)
    if json_file is not None:
        json_file.write_text(found.to_json() + "\n", encoding="utf-8")
    _print(found)


@app.command()
def calibrate(
    device: Device = "cpu",
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="A folder on the disk that offload goes to; by default a temporary one."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file, too.")] = None,
) -> None:
    """Measure how fast this machine computes and copies, and keep that for what is planned on it.

    Takes some three minutes; let nothing else run. Measure again after a change of the machine or of PyTorch's
    threads.
    """
    _check_files(json_file, None)
    with _Bar() as show:
        spec = measure_device(device, os.path.abspath(folder or tempfile.gettempdir()), show)
    path = store_measured(spec)
    if json_file is not None:
        json_file.write_text(json.dumps(spec.to_dict(), indent=2) + "\n", encoding="utf-8")
    _print(render_device(spec), Text(f"kept in {path}"))


def _print(*parts: RenderableType) -> None:
    """Print to the terminal as wide as it is, to a file or a pipe as wide as the tables are."""
    console = Console()
    (console if console.is_terminal else Console(width=WIDTH)).print(*parts)


def _check_files(json_file: Path | None, plot_file: Path | None, html_file: Path | None = None) -> None:
    if plot_file is not None:
        check_plot(plot_file)
    for option, file in (("--json", json_file), ("--html", html_file)):
        if file is not None and not file.resolve().parent.is_dir():
            raise SettingsError(f"{option} {file}: there is no such folder.")


def _planned(command: str, model: str | None, config: Path | None) -> str:
    if (model is None) == (config is None):
        raise SettingsError(f"{command}: give a model, or --config with a folder or a file.")
    return model or str(config)


def _settings(
    spec: ModelSpec, every_n: int, offload: bool, save: list[str] | None = None, budget: str | None = None
) -> Settings:
    return make_settings(every_n=every_n, offload=offload, layers=spec.layers or None, save=save or (), budget=budget)


def _spec(
    model: str,
    batch: int,
    seq: int,
    dtype: str | None,
    device: str,
    overrides: list[str] | None,
    layers: list[str] | None,
    dropout: str,
    trust: bool,
) -> ModelSpec:
    if dropout not in ("on", "off"):
        raise SettingsError(f"--dropout {dropout}: use on or off.")
    changed, names = parse_overrides(overrides or ()), tuple(layers or ())
    return ModelSpec(model, batch, seq, dtype, device, changed, names, dropout == "on", trust)


class _Bar(Progress):
    """A progress bar on standard error, called with what is done, out of how much, and what is done now."""

    def __init__(self) -> None:
        columns: tuple[Any, ...] = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        text = TextColumn("{task.description}", markup=False)
        console = Console(stderr=True)
        super().__init__(*columns, text, console=console, transient=True, disable=not console.is_terminal)
        self.bar = self.add_task("", total=None)

    def __call__(self, done: int, total: int, text: str) -> None:
        self.update(self.bar, completed=done, total=total, description=text)


def main() -> None:
    """Run the command of the command line; an error of fxckpt's is one line on standard error and exit status 2."""
    try:
        app(prog_name="fxckpt")
    except FxckptError as error:
        print(f"fxckpt: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
