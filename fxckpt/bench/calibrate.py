"""Measure how fast this machine is: products and other operators, memory, copies to the host, a disk."""

from __future__ import annotations

import datetime
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from rich.table import Table
from rich.text import Text

from fxckpt.bench.rates import (
    attention_rates,
    call_seconds,
    fresh_rate,
    function_rates,
    median_seconds,
    memory_rate,
    product_rates,
    timed,
)
from fxckpt.bench.reference import ReferenceStep
from fxckpt.bench.run import Progress
from fxckpt.decide.device import AttentionRate, DeviceSpec, Disk, ProductRate, identity
from fxckpt.errors import TransferError
from fxckpt.models.spec import check_device
from fxckpt.runtime.disk import DiskTier, OnDisk
from fxckpt.runtime.stats import Account, Meter, Step

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDS = 3
STEPS = 5
"""Of the reference, in each round."""
ENOUGH_SECONDS = 0.1
"""A product, or a copy, that takes this long says how fast they are."""
LARGEST = 16384
"""Rows and columns of the largest product tried."""
BLOCK_BYTES, BLOCKS = 32 << 20, 8
"""What goes to a disk and back: so many blocks, each as large as an activation may be."""
TOTAL_BYTES = BLOCK_BYTES * BLOCKS


def calibrate(device: str, folder: str, on_progress: Progress = lambda done, total, text: None) -> DeviceSpec:
    """Measure a device, and the disk of a folder.

    Takes some three minutes. What else runs on the machine makes it slower than it is; all but the disk is
    measured in rounds, of which the median counts, so that it may be slow for a while.

    Args:
        device: ``cpu`` or ``cuda``.
        folder: a folder on the disk.
        on_progress: called with what is done, out of how much, and what is done now.

    Raises:
        SettingsError: there is no such device.
        TransferError: the folder cannot take 256 MiB.
    """
    check_device(device)
    where = torch.device(device)
    parts = 2 * len(DTYPES) + 4
    total, done = ROUNDS * parts + 1, 0

    def say(text: str) -> None:
        nonlocal done
        on_progress(done, total, text)
        done += 1

    say(f"disk of {folder}")
    disk = _disk_rates(folder)
    fastest: dict[torch.dtype, float] = {}
    reference = ReferenceStep(where) if where.type == "cpu" else None
    rounds = [_measure(where, fastest, reference, say) for _ in range(ROUNDS)]
    on_progress(total, total, "")
    spec = _merged(where, rounds, disk)
    predicted, took = reference and reference.predicted(spec), _median([r.step for r in rounds])
    return replace(spec, overhead=took / predicted) if took and predicted else spec


def _merged(where: torch.device, rounds: Sequence[_Round], disk: Disk) -> DeviceSpec:
    """The median of the rounds, figure by figure."""
    one = rounds[0]
    return DeviceSpec(
        name=identity(where),
        source=f"measured on {datetime.date.today().isoformat()}",
        flops=_medians([r.flops for r in rounds]),
        bandwidth=statistics.median(r.bandwidth for r in rounds),
        to_host=_median([r.to_host for r in rounds]),
        from_host=_median([r.from_host for r in rounds]),
        disks=(disk,),
        products=tuple(
            replace(p, rate=statistics.median(r.products[i].rate for r in rounds)) for i, p in enumerate(one.products)
        ),
        attention=tuple(
            replace(
                a,
                forward=statistics.median(r.attention[i].forward for r in rounds),
                backward=statistics.median(r.attention[i].backward for r in rounds),
            )
            for i, a in enumerate(one.attention)
        ),
        functions=_medians([r.functions for r in rounds]),
        fresh=_median([r.fresh for r in rounds]),
        call=_median([r.call for r in rounds]),
    )


@dataclass(frozen=True)
class _Round:
    """What one round of measurements found; the attributes are those of :class:`DeviceSpec`."""

    flops: dict[str, float]
    products: list[ProductRate]
    attention: list[AttentionRate]
    functions: dict[str, float]
    bandwidth: float
    fresh: float | None
    call: float | None
    to_host: float | None
    from_host: float | None
    step: float | None


def _measure(
    where: torch.device,
    fastest: dict[torch.dtype, float],
    reference: ReferenceStep | None,
    say: Callable[[str], None],
) -> _Round:
    """One round; `fastest` holds what the first one found for large products, so that all try the same sizes."""
    flops: dict[str, float] = {}
    products: list[ProductRate] = []
    attention: list[AttentionRate] = []
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        say(f"products of {name}")
        flops[name] = product_rate(where, dtype)
        products += product_rates(where, dtype, fastest.setdefault(dtype, flops[name]))
        say(f"attention of {name}")
        attention += attention_rates(where, dtype)
    on_cpu = where.type == "cpu"
    say("functions and calls")
    functions, call = function_rates(where), call_seconds(where) if on_cpu else None
    say("memory")
    bandwidth, fresh = memory_rate(where), fresh_rate(where) if on_cpu else None  # elsewhere PyTorch keeps its memory
    say("copies to the host")
    to_host, from_host = _host_rates(where) if where.type == "cuda" else (None, None)
    say("a training step")
    step = None if reference is None else statistics.median(reference.seconds() for _ in range(STEPS))
    return _Round(flops, products, attention, functions, bandwidth, fresh, call, to_host, from_host, step)


def _median(found: Sequence[float | None]) -> float | None:
    """Of the rounds' figures, where there are any."""
    known = [f for f in found if f is not None]
    return statistics.median(known) if known else None


def _medians(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def render_device(spec: DeviceSpec) -> Table:
    """The figures as a table."""
    table = Table(title=Text(f"{spec.name} ({spec.source})"), title_justify="left")
    table.add_column("what")
    table.add_column("rate", justify="right")
    for name, rate in spec.flops.items():
        table.add_row(f"matrix products, {name}", f"{rate / 1e9:,.1f} GFLOP/s")
        slow, fast = _range(one.rate for one in spec.products or () if one.dtype == name)
        table.add_row("  by size", f"{slow / 1e9:,.1f}–{fast / 1e9:,.1f} GFLOP/s")
        slow, fast = _range(one.forward for one in spec.attention or () if one.dtype == name)
        table.add_row(f"attention, {name}, by size", f"{slow / 1e9:,.1f}–{fast / 1e9:,.1f} GFLOP/s")
    for name, rate in (spec.functions or {}).items():
        table.add_row(name, f"{rate / 1e9:,.2f} G/s")
    rows = [("memory, read and written", spec.bandwidth), ("memory, written for the first time", spec.fresh)]
    rows.append(("to the host", spec.to_host))
    rows.append(("from the host", spec.from_host))
    for disk in spec.disks:
        rows += [(f"to the disk of {disk.folder}", disk.write), (f"from the disk of {disk.folder}", disk.read)]
    if spec.overhead is not None:
        table.add_row("a step, next to its operators", f"{spec.overhead:.2f} times as long")
    for what, found in rows:
        if found is not None:
            table.add_row(Text(what), f"{found / 1e9:,.2f} GB/s")
    return table


def _range(rates: Iterable[float]) -> tuple[float, float]:
    known = sorted(rates)
    return (known[0], known[-1]) if known else (0.0, 0.0)


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the smallest product of square matrices that takes long enough."""
    n = 256
    while True:
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        torch.mm(a, b)
        seconds = next(timed(functools.partial(torch.mm, a, b), device))
        if seconds >= ENOUGH_SECONDS or n == LARGEST:
            break
        n *= 2
    return float(2 * n**3 / median_seconds(functools.partial(torch.mm, a, b), device))


def _copy_rate(source: torch.Tensor, target: torch.device, pinned: bool = False) -> float:
    """Bytes per second of copies of `source` to memory on `target`."""
    out = torch.empty_like(source, device=target, pin_memory=pinned)
    device = source.device if source.device.type == "cuda" else target
    out.copy_(source)
    return source.nbytes / median_seconds(lambda: out.copy_(source, non_blocking=True), device)


def _host_rates(device: torch.device) -> tuple[float, float]:
    on_device = torch.empty(TOTAL_BYTES, dtype=torch.uint8, device=device)
    on_host = torch.empty(TOTAL_BYTES, dtype=torch.uint8, pin_memory=True)
    return _copy_rate(on_device, torch.device("cpu"), pinned=True), _copy_rate(on_host, device)


def _disk_rates(folder: str) -> Disk:
    """As training uses it: through the disk tier, both directions apart."""
    meter = Meter()
    tier = DiskTier(folder, meter)
    account = Account("calibration", BLOCK_BYTES, meter, Step())
    block = torch.randint(256, (BLOCK_BYTES,), dtype=torch.uint8)  # a disk may be quick with zeros
    try:
        tier.reserve(TOTAL_BYTES)
        start = time.perf_counter()
        stored: list[OnDisk] = [tier.send(block, account) for _ in range(BLOCKS)]
        for one in stored:
            one.wait()
        written = time.perf_counter()
        for one in stored:
            one.reload(block).wait()
        read = time.perf_counter()
    except OSError as error:
        raise TransferError(
            f"{folder} cannot take {TOTAL_BYTES} bytes: {error}. Choose another folder with --dir."
        ) from error
    return Disk(folder, TOTAL_BYTES / (written - start), TOTAL_BYTES / (read - written))
