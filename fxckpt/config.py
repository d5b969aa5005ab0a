"""Options: frozen dataclasses, checked on construction."""

from __future__ import annotations

import hashlib
import marshal
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

from torch import nn

from fxckpt.errors import SettingsError

LayerSpec: TypeAlias = "type[nn.Module] | str | Callable[[str, nn.Module], bool]"
"""One way to name boundary layers: a class, a name pattern such as ``"blocks.*"``, or ``(name, module) -> bool``."""

VERSION = "0.1.0"


@dataclass(frozen=True)
class Offload:
    """Where activations go between the forward and the backward, and when: boundary activations of recomputed regions.

    Raises:
        SettingsError: a value means nothing.
    """

    to: Literal["cpu", "disk"] = "cpu"
    """``"cpu"``: host memory, pinned where the activation comes from a CUDA device. ``"disk"``: a file without a name,
    which goes with the process."""
    dir: str | None = None
    """For ``"disk"``, the folder that holds the file; None means the system's folder for temporary files."""
    max_in_flight: int = 2
    """How many offloads may be under way at once. Until one is done, its activation stays in device memory."""
    prefetch: int = 1
    """How many regions before the one that reads it an activation starts on its way back; 0: right before it is
    read."""
    kept: bool = False
    """Whether what kept layers save for backward goes there, too."""

    def __post_init__(self) -> None:
        place: str = self.to
        if place not in ("cpu", "disk"):
            raise SettingsError(f'Offload(to={self.to!r}): the place must be "cpu" or "disk".')
        check_whole("max_in_flight", self.max_in_flight, 1)
        check_whole("prefetch", self.prefetch, 0)
        if not isinstance(self.kept, bool):
            raise SettingsError(f"Offload(kept={self.kept!r}): say True or False.")
        if self.dir is not None:
            if place != "disk":
                raise SettingsError(f'Offload(to={self.to!r}, dir={self.dir!r}): a folder is for to="disk" only.')
            object.__setattr__(self, "dir", os.path.abspath(os.fspath(self.dir)))

    @property
    def folder(self) -> str:
        """For ``"disk"``, the folder that holds the file."""
        return self.dir or tempfile.gettempdir()

    @property
    def place(self) -> str:
        """Place and folder as one text, as the transfer operators take it: ``"cpu"``, or ``"disk:"`` and the folder."""
        return self.to if self.to == "cpu" else f"disk:{self.folder}"


@dataclass(frozen=True)
class Budget:
    """The most memory that a training step may take.

    Attributes:
        nbytes: bytes of the step's peak, on top of parameters and the batch.
        share: where `nbytes` is None, the share of the device's whole memory that may be taken with parameters and
            buffers, above 0 and at most 1.
    """

    nbytes: int | None = None
    share: float | None = None


@dataclass(frozen=True)
class Settings:
    """All that ``transform`` was asked for. Equal settings give equal graphs, and equal :meth:`key`."""

    every_n: int = 1
    """Boundary layers 0, n, 2n, ... in the order of ``model.modules()`` are recomputed."""
    offload: Offload | None = None
    """Where boundary activations go, or None to leave them where they are."""
    layers: tuple[LayerSpec, ...] | None = None
    """Which modules are boundary layers; None means the ``GradientCheckpointingLayer`` instances."""
    policy: Any = None
    """A policy in place of ``every_n``; None means every n-th layer."""
    budget: Budget | None = None
    """In place of a policy, what the peak of a step is to stay within; the first call then chooses the policy."""
    save: tuple[str, ...] = ()
    """Interior values of recomputed regions that are saved all the same."""
    optimizer_bytes: int | None = field(default=None, compare=False)
    """What an optimizer keeps beside the parameters, where that was asked for."""
    verify: bool = False
    """Check the graph invariants after every pass, in every captured graph."""
    debug_dir: Path | None = field(default=None, compare=False)
    """Folder for numbered graphs before and after each pass, and the time of each."""
    enabled: bool = True
    """False after ``gradient_checkpointing_disable()``: calls run as the original model's."""

    def __post_init__(self) -> None:
        check_whole("every_n", self.every_n, 1)
        if self.offload is not None and not isinstance(self.offload, Offload):
            raise SettingsError(f'offload={self.offload!r}: use False, True, "cpu", "disk" or fxckpt.Offload(...).')

    def key(self) -> str:
        """Text that names these settings and the version of fxckpt's own source, for compile caches."""
        specs = None if self.layers is None else [_describe(s) for s in self.layers]
        chosen = None if self.policy is None else _describe(self.policy)
        text = f"n={self.every_n} offload={self.offload} layers={specs} policy={chosen} save={self.save}"
        text += "" if self.budget is None else f" budget={self.budget}"
        return f"{text} fxckpt={VERSION}+{source_hash()}"


def make_settings(
    *,
    every_n: int = 1,
    offload: Any = None,
    layers: Any = None,
    policy: Any = None,
    budget: Any = None,
    save: Any = (),
    verify: bool = False,
    debug_dir: str | Path | None = None,
) -> Settings:
    """Settings from what a user passed to ``transform``.

    Raises:
        SettingsError: a value means nothing.
    """
    if budget is not None and (every_n != 1 or policy is not None):
        raise SettingsError("budget= chooses what every_n= and policy= would say: leave these out.")
    return Settings(
        every_n=every_n,
        offload=parse_offload(offload),
        layers=_parse_layers(layers),
        policy=policy,
        budget=None if budget is None else parse_budget(budget),
        save=parse_save(save),
        verify=verify,
        debug_dir=Path(debug_dir) if debug_dir is not None else None,
    )


def check_whole(name: str, number: Any, least: int) -> None:
    """Refuse what is no whole number of at least `least`.

    Raises:
        SettingsError: it is none.
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise SettingsError(f"{name}={number!r}: it must be a whole number of at least {least}.")


def parse_offload(offload: Any) -> Offload | None:
    """``False``/``None``, ``True``, a place's name, an :class:`Offload` or a dict of its options, as Offload or None.

    Raises:
        SettingsError: none of these.
    """
    if offload is None or offload is False:
        return None
    if offload is True:
        return Offload()
    if isinstance(offload, str):
        return Offload(to=offload)  # type: ignore[arg-type]
    if isinstance(offload, Offload):
        return offload
    if isinstance(offload, Mapping):  # as it comes from a file of settings, or from TrainingArguments
        known = [f.name for f in fields(Offload)]
        unknown = sorted(map(str, set(offload) - set(known)))
        if unknown:
            raise SettingsError(f"offload: unknown {', '.join(unknown)}; its options are {', '.join(known)}.")
        return Offload(**offload)
    raise SettingsError(f'offload={offload!r}: use False, True, "cpu", "disk" or fxckpt.Offload(...).')


_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("kmgt", 1)
    for unit, base in (("", 1000), ("b", 1000), ("ib", 1024))
}


def parse_budget(budget: Any) -> Budget:
    """Bytes, text such as ``"24GiB"`` or ``"500 MB"``, or a share of the device's memory, ``"80%"``.

    Raises:
        SettingsError: none of these.
    """
    if isinstance(budget, Budget):
        return budget
    if isinstance(budget, int) and not isinstance(budget, bool) and budget > 0:
        return Budget(budget)
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|[a-z]*)\s*", budget.lower()) if isinstance(budget, str) else None
    if found is not None:
        number, unit = float(found[1]), found[2]
        if unit == "%" and 0 < number <= 100:
            return Budget(share=number / 100)
        if unit in _UNITS and number * _UNITS[unit] >= 1:
            return Budget(int(number * _UNITS[unit]))
    raise SettingsError(f'budget={budget!r}: give bytes, a text such as "24GiB" or "500MB", or a share such as "80%".')


def parse_save(save: Any) -> tuple[str, ...]:
    """One text, or several, as a tuple without doubles.

    Raises:
        SettingsError: something else.
    """
    entries = (save,) if isinstance(save, str) else tuple(save) if isinstance(save, list | tuple | set) else None
    if entries is None or not all(isinstance(entry, str) and entry for entry in entries):
        raise SettingsError(
            f'save={save!r}: give texts, each "attention", "matmul", an operator\'s name such as "aten.mm", or a name '
            "that fxckpt.name gave."
        )
    return tuple(dict.fromkeys(entries))


def _parse_layers(layers: Any) -> tuple[LayerSpec, ...] | None:
    if layers is None:
        return None
    specs = tuple(layers) if isinstance(layers, (list, tuple, set, frozenset)) else (layers,)
    if not specs:
        raise SettingsError("layers=[] names no layer; leave it out or name at least one class, pattern or predicate.")
    for spec in specs:
        if isinstance(spec, type) and not issubclass(spec, nn.Module):
            raise SettingsError(f"layers: {spec.__name__} is not a subclass of torch.nn.Module.")
        if isinstance(spec, nn.Module):
            raise SettingsError(f"layers: a {type(spec).__name__} itself is given; give its class or its name.")
        if not isinstance(spec, str) and not callable(spec):
            raise SettingsError(
                f"layers: {spec!r} is neither a module class, a name pattern, nor a predicate (name, module) -> bool."
            )
    return specs


def _describe(spec: Any) -> str:
    if isinstance(spec, str):
        return repr(spec)
    if isinstance(spec, type):
        return f"{spec.__module__}.{spec.__qualname__}"
    code = getattr(spec, "__code__", None)
    if code is not None:  # a predicate: its code and what it closes over
        cells = [repr(c.cell_contents) for c in (spec.__closure__ or ())]
        body = marshal.dumps(code) + repr(cells).encode()
        return f"{spec.__qualname__}:{hashlib.sha256(body).hexdigest()[:16]}"
    if getattr(type(spec), "__repr__", None) is object.__repr__:  # an address would differ from process to process
        return _describe(type(spec))
    return repr(spec)


@cache
def source_hash() -> str:
    """Hash of fxckpt's own source files: a changed pass never meets a cache entry of the old one."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
