"""How fast a device is: measured on this machine (``fxckpt calibrate``), or as its maker publishes it.

What is not known is None, and never a guess.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fxckpt.errors import SettingsError

TERA, GIGA = 10**12, 10**9


@dataclass(frozen=True)
class Disk:
    """How fast a folder's disk is, for the transfers of one training process.

    Attributes:
        folder: where it was measured.
        write: bytes per second.
        read: bytes per second.
    """

    folder: str
    write: float
    read: float


@dataclass(frozen=True)
class ProductRate:
    """How fast matrix products of one size are: of `m` rows, `n` columns and `k` summands for each.

    Attributes:
        dtype: of the matrices, such as ``"float32"``.
        batched: whether many are done at once (``torch.bmm``).
        m: rows of the result.
        k: summands.
        n: columns of the result.
        rate: floating point operations per second, a multiply-add counting as two.
    """

    dtype: str
    batched: bool
    m: int
    k: int
    n: int
    rate: float


@dataclass(frozen=True)
class AttentionRate:
    """How fast PyTorch's attention operator is for one size, in FLOPs per second as PyTorch counts them.

    PyTorch counts the products with every key, also where a causal kernel leaves out half of them.

    Attributes:
        dtype: of queries, keys and values.
        is_causal: whether each token attends to those before it alone.
        tokens: queries, and as many keys.
        head: width of a head.
        forward: rate of the operator.
        backward: rate of its gradient.
    """

    dtype: str
    is_causal: bool
    tokens: int
    head: int
    forward: float
    backward: float


@dataclass(frozen=True)
class DeviceSpec:
    """How fast a device is.

    Attributes:
        name: what it is, as :func:`identity` says.
        source: where the figures are from.
        flops: floating point operations per second of large matrix products, by dtype, a multiply-add counting as two.
        bandwidth: bytes per second read and written in its memory.
        to_host: bytes per second to pinned host memory; None for a CPU, whose memory that is.
        from_host: bytes per second from there.
        disks: disks that were measured.
        products: rates of products by size; None, as for all that follows, where unknown.
        attention: rates of attention by size.
        functions: values per second of functions that take many instructions, by name: ``exp``, ``tanh``, ``erf``; and
            of ``scatter``, which adds rows of values where indices say.
        fresh: bytes per second of first writes to memory that is new to the process.
        call: seconds that a call of an operator takes at least.
        overhead: how many times as long a whole step takes as its operators measured one by one.
    """

    name: str
    source: str
    flops: Mapping[str, float] = field(default_factory=dict)
    bandwidth: float | None = None
    to_host: float | None = None
    from_host: float | None = None
    disks: tuple[Disk, ...] = ()
    products: tuple[ProductRate, ...] | None = None
    attention: tuple[AttentionRate, ...] | None = None
    functions: Mapping[str, float] | None = None
    fresh: float | None = None
    call: float | None = None
    overhead: float | None = None

    def disk(self, folder: str) -> Disk | None:
        """The disk that `folder` lies on, or None if it was not measured."""
        for disk in self.disks:
            if disk.folder == folder:
                return disk
        return next((disk for disk in self.disks if _same_disk(disk.folder, folder)), None)

    def to_dict(self) -> dict[str, Any]:
        """All figures by name, for JSON."""
        return dataclasses.asdict(self)


def _published(name: str, source: str, *, half: float, single: float, memory: float, host: float) -> DeviceSpec:
    """A GPU's figures: TFLOP/s of dense bf16 (or fp16) and fp32 products, GB/s of its memory, GB/s of its bus."""
    flops = {"bfloat16": half * TERA, "float16": half * TERA, "float32": single * TERA}
    return DeviceSpec(name, source, flops, memory * GIGA, host * GIGA, host * GIGA)


PUBLISHED: tuple[DeviceSpec, ...] = (
    _published("NVIDIA H200", "NVIDIA H200 datasheet (SXM)", half=989, single=67, memory=4800, host=64),
    _published("NVIDIA H100 PCIe", "NVIDIA H100 datasheet (PCIe)", half=756, single=51, memory=2000, host=64),
    _published("NVIDIA H100 80GB HBM3", "NVIDIA H100 datasheet (SXM)", half=989, single=67, memory=3350, host=64),
    _published("NVIDIA A100-PCIE-40GB", "NVIDIA A100 datasheet", half=312, single=19.5, memory=1555, host=32),
    _published("NVIDIA A100-SXM4-40GB", "NVIDIA A100 datasheet", half=312, single=19.5, memory=1555, host=32),
    _published("NVIDIA A100 80GB PCIe", "NVIDIA A100 datasheet", half=312, single=19.5, memory=1935, host=32),
    _published("NVIDIA A100-SXM4-80GB", "NVIDIA A100 datasheet", half=312, single=19.5, memory=2039, host=32),
    _published("NVIDIA L40S", "NVIDIA L40S datasheet", half=362, single=91.6, memory=864, host=32),
    _published("NVIDIA A10", "NVIDIA A10 datasheet", half=125, single=31.2, memory=600, host=32),
    _published("NVIDIA L4", "NVIDIA L4 datasheet", half=121, single=30.3, memory=300, host=32),
    _published("NVIDIA GeForce RTX 4090", "NVIDIA Ada paper", half=165.2, single=82.6, memory=1008, host=32),
    _published("NVIDIA GeForce RTX 3090", "NVIDIA GA102 paper", half=71, single=35.6, memory=936, host=32),
)
"""GPUs by the whole name that PyTorch gives them, so that no slice and no laptop's variant passes for one.

Rates are those without sparsity. The bus's are one direction's nominal ones: PCIe 4.0 x16 has 32 GB/s, 5.0 x16 64 GB/s.
"""


def identity(device: torch.device) -> str:
    """What `device` is, as far as its speed goes: a GPU's name, or the processor and PyTorch's number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, threads: {torch.get_num_threads()}" if device.type == "cpu" else device.type


def find_device(device: torch.device) -> DeviceSpec | None:
    """How fast `device` is: as measured on this machine, else as published, else None."""
    return _find_named(identity(device))


def choose_device(wanted: Any) -> DeviceSpec | None:
    """How fast the device is that a user names; None where that is not known.

    Args:
        wanted: a :class:`DeviceSpec`, the name of one, or a PyTorch device of this machine or its name.

    Raises:
        SettingsError: it is none of these.
    """
    if isinstance(wanted, DeviceSpec):
        return wanted
    if isinstance(wanted, str) and (named := _find_named(wanted)) is not None:
        return named
    try:
        return find_device(torch.device(wanted))
    except (RuntimeError, AssertionError, TypeError) as error:  # no such device: a wrong name, or not in this machine
        known = ", ".join(sorted({*load_measured(), *(spec.name for spec in PUBLISHED)}))
        raise SettingsError(
            f"device={wanted!r}: this machine has no such device, and none of this name is known. Give a "
            f"torch.device, a fxckpt.decide.device.DeviceSpec, or one of: {known}."
        ) from error


def _find_named(name: str) -> DeviceSpec | None:
    measured = load_measured().get(name)
    if measured is not None:
        return measured
    return next((spec for spec in PUBLISHED if spec.name == name), None)


def store_path() -> Path:
    """The file of what was measured: ``devices.json`` in ``$FXCKPT_CACHE``, else in the user's cache folder."""
    own = os.environ.get("FXCKPT_CACHE")
    if own:
        return Path(own) / "devices.json"
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "fxckpt" / "devices.json"


def load_measured() -> dict[str, DeviceSpec]:
    """What was measured on this machine, by name; read once a process.

    Raises:
        SettingsError: the file is not one of ours.
    """
    return _load(store_path())


def measured_key() -> str:
    """Text that names all that was measured and what chooses from it, for compile caches."""
    text = f"{sorted(load_measured().items())} {torch.get_num_threads()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def _load(path: Path) -> dict[str, DeviceSpec]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}. It holds what `fxckpt calibrate` measured.") from error
    try:
        return {one["name"]: _from_dict(one) for one in json.loads(text)}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SettingsError(
            f"{path} is no list of devices ({error}): remove it, and run `fxckpt calibrate`."
        ) from error


def store_measured(spec: DeviceSpec) -> Path:
    """Keep what was measured, in place of what was known of this device but for other disks; the file.

    Raises:
        SettingsError: the file cannot be written.
    """
    path = store_path()
    _load.cache_clear()
    known = dict(load_measured())
    before = known.get(spec.name)
    measured = {disk.folder for disk in spec.disks}
    others = [disk for disk in before.disks if disk.folder not in measured] if before is not None else []
    known[spec.name] = dataclasses.replace(spec, disks=(*spec.disks, *others))
    text = json.dumps([one.to_dict() for one in known.values()], indent=2) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(text, encoding="utf-8")
        part.replace(path)  # at once: another process may be reading it
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}. Set FXCKPT_CACHE to a folder to write to.") from error
    _load.cache_clear()
    return path


def _from_dict(given: Mapping[str, Any]) -> DeviceSpec:
    made: dict[str, Any] = {"disks": tuple(Disk(**disk) for disk in given["disks"])}
    for name, kind in (("products", ProductRate), ("attention", AttentionRate)):
        made[name] = None if given.get(name) is None else tuple(kind(**one) for one in given[name])
    spec = DeviceSpec(**{**given, **made})
    rates = [*spec.flops.values(), spec.bandwidth, spec.to_host, spec.from_host, spec.fresh, spec.call, spec.overhead]
    rates += [rate for disk in spec.disks for rate in (disk.write, disk.read)]
    rates += [one.rate for one in spec.products or ()] + list((spec.functions or {}).values())
    rates += [rate for one in spec.attention or () for rate in (one.forward, one.backward)]
    if not all(rate is None or rate > 0 for rate in rates):
        raise ValueError("a rate is not positive")
    return spec


def _same_disk(a: str, b: str) -> bool:
    try:
        return os.stat(a).st_dev == os.stat(b).st_dev
    except OSError:
        return False


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
