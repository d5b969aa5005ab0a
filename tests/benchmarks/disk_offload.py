"""The disk tier on a CPU: what it frees, and what it costs.

    python -m tests.benchmarks.disk_offload                              # the bench set's Llama, 4096 tokens, 50 steps
    python -m tests.benchmarks.disk_offload --vocab 1024 --layers 32 --seq 4096 --steps 5
    python -m tests.benchmarks.disk_offload --read-rate 16 --steps 10    # from a disk that gives 16 MB/s

Two processes train the same model, every layer recomputed, under ``torch.compile``, in turns, a step each: one keeps
the boundary activations, the other offloads them to a file in ``--dir``. Resident memory is what the operating system
says: the high-water mark of a step (``VmHWM`` of ``/proc/self/status``, set back before it) over what was resident
before it. For that, both processes tell the C library to give freed blocks back instead of keeping them
(``MALLOC_MMAP_THRESHOLD_``).

With ``--read-rate`` reads take as long as they would from such a disk, and a third process takes part, which knows what
``fxckpt calibrate`` would say of this machine with that disk.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=8192, help="8192 to a hidden size of 256 is Llama 3's proportion")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--dir", default=tempfile.gettempdir())
    parser.add_argument("--read-rate", type=float, help="MB/s that reads are slowed down to")
    parser.add_argument("--write-rate", type=float, help="MB/s that writes are slowed down to")
    parser.add_argument("--serve", choices=("keep", "disk", "calibrated"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return
    which = ["keep", "disk"] if options.read_rate is None else ["keep", "disk", "calibrated"]
    with tempfile.TemporaryDirectory() as cache:
        os.environ["FXCKPT_CACHE"] = cache
        if options.read_rate is not None:
            store_rates(options.dir, options.read_rate * 1e6)
        compare(which, options.steps)


def compare(which: list[str], steps: int) -> None:
    """Let the peers take turns, and print what they say."""
    peers = [Peer(one, sys.argv[1:]) for one in which]
    for peer in peers:
        print(f"{peer.which}: first steps {peer.ask('warm')['seconds']:.0f} s", flush=True)
    times = [[peer.ask("step")["seconds"] for peer in peers] for _ in range(steps)]
    keep, *others = [peer.ask("figures") for peer in peers]
    for i, other in enumerate(others, 1):
        print(f"{peers[i].which}:", report(keep, other, [(row[0], row[i]) for row in times]), sep="\n")


def report(keep: dict[str, Any], disk: dict[str, Any], times: list[tuple[float, float]]) -> str:
    """The figures in words and as a row of a table."""
    freed = keep["high_water"] - disk["high_water"]
    step = statistics.median(d for _, d in times)
    stalls = statistics.median(disk["stalls"]) / step
    return "\n".join(
        (
            f"offloaded by the plan {disk['offloaded'] / MIB:.1f} MiB in {disk['offloads']} transfers",
            f"high-water mark of a step {keep['high_water'] / MIB:.1f} MiB -> {disk['high_water'] / MIB:.1f} MiB: "
            f"{freed / MIB:.1f} MiB freed, {freed / disk['offloaded']:.1%} of what is offloaded",
            f"step {statistics.median(k for k, _ in times):.2f} s -> {step:.2f} s, median ratio "
            f"{statistics.median(d / k for k, d in times):.3f}; stall {stalls:.1%} of a step",
            f"host staging {disk['host'] / MIB:.1f} MiB, file {disk['disk'] / MIB:.1f} MiB, threads "
            f"{disk['threads'][0]} -> {disk['threads'][1]}, open files {disk['files'][0]} -> {disk['files'][1]}",
        )
    )


class Peer:
    """A process that trains one of the two."""

    def __init__(self, which: str, arguments: list[str]) -> None:
        self.which = which
        command = [sys.executable, "-m", "tests.benchmarks.disk_offload", "--serve", which, *arguments]
        env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
        if which != "calibrated":
            env["FXCKPT_CACHE"] = os.path.join(env["FXCKPT_CACHE"], "nothing")
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def ask(self, what: str) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


def serve(options: argparse.Namespace) -> None:
    """Answer requests on standard input."""
    import threading
    import time

    import torch

    import fxckpt
    from fxckpt.bench.step import TrainingStep
    from fxckpt.models.load import load
    from fxckpt.models.spec import ModelSpec
    from tests.benchmarks.bench_set import DECODER

    def told(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key + ":"))

    def levels() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    over = {
        "num_hidden_layers": options.layers,
        "hidden_size": options.hidden,
        "intermediate_size": 43 * options.hidden // 16,
        "max_position_embeddings": options.seq,
        "vocab_size": options.vocab,
    }
    spec = ModelSpec("llama", batch=options.batch, seq=options.seq, overrides={**DECODER, **over})
    model, batch = load(spec)
    slow_down("read", options.read_rate)
    slow_down("write", options.write_rate)
    offload = fxckpt.Offload(to="disk", dir=options.dir) if options.serve != "keep" else False
    t = fxckpt.transform(model, offload=offload)
    step = TrainingStep(model, torch.compile(t), batch, seed=0)
    stalls: list[float] = []
    marks: list[int] = []
    before = (0, 0)
    for line in sys.stdin:
        answer: dict[str, Any] = {}
        if line.strip() == "warm":
            start = time.perf_counter()
            for _ in range(3):
                step.timed()
            answer["seconds"] = time.perf_counter() - start
            before = levels()
        elif line.strip() == "step":
            model.zero_grad(set_to_none=True)
            Path("/proc/self/clear_refs").write_text("5")
            base = told("VmRSS")
            answer["seconds"] = step.timed()
            marks.append(told("VmHWM") - base)
            stalls.append(fxckpt.stats(t).stall_seconds)
        else:
            figures = fxckpt.stats(t)
            after = levels()
            answer = {
                "high_water": statistics.median(marks),
                "stalls": stalls,
                "offloaded": figures.offloaded_bytes,
                "offloads": figures.offloads,
                "host": figures.host_bytes,
                "disk": figures.disk_bytes,
                "threads": (before[0], after[0]),
                "files": (before[1], after[1]),
            }
        print(json.dumps(answer), flush=True)


def slow_down(direction: str, rate: float | None) -> None:
    """Let reads or writes of our files take at least as long as from or to a disk of `rate` MB/s."""
    import time

    from fxckpt.runtime.file import SpillFile

    if rate is None:
        return
    move, bytes_per_second = getattr(SpillFile, direction), rate * 1e6

    def slow(self: SpillFile, offset: int, memory: memoryview) -> None:
        start = time.perf_counter()
        move(self, offset, memory)
        time.sleep(max(0.0, len(memory) / bytes_per_second - (time.perf_counter() - start)))

    setattr(SpillFile, direction, slow)


def store_rates(folder: str, read_rate: float) -> None:
    """Keep what ``fxckpt calibrate`` would of this machine if its disk gave `read_rate` bytes a second."""
    import torch

    from fxckpt.bench.calibrate import product_rate
    from fxckpt.decide.device import DeviceSpec, Disk, identity, store_measured

    cpu = torch.device("cpu")
    flops = {"float32": product_rate(cpu, torch.float32)}
    store_measured(DeviceSpec(identity(cpu), "measured", flops, disks=(Disk(folder, read_rate, read_rate),)))


if __name__ == "__main__":
    main()
