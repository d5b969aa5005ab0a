"""What a transformed model knows: its original, its settings, and the graphs captured from it."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import fx, nn

from fxckpt.capture.regions import BoundaryLayer
from fxckpt.config import Settings
from fxckpt.decide.layers import boundary_layers
from fxckpt.decide.policy import Treatment, decide_layers
from fxckpt.pipeline import GraphRecord, Request
from fxckpt.torch_private import JointCapture


@dataclass(eq=False)
class State:
    """Of one transformed model.

    Attributes:
        model: the original model, whose modules and parameters the transformed one shares.
        settings: what was asked for.
        records: one for each captured graph, in order of capture.
        pending: captures that a compile cache answered; each leaves its record when called.
        captures: joint graphs seen so far, rewritten or about to be.
    """

    model: nn.Module
    settings: Settings
    records: list[GraphRecord] = field(default_factory=list)
    pending: list[Callable[[], None]] = field(default_factory=list)
    compiled: dict[Any, Callable[..., Any]] = field(default_factory=dict)
    captures: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)

    def layers(self) -> list[BoundaryLayer]:
        """The model's boundary layers as it is now."""
        return boundary_layers(self.model, self.settings.layers)

    def treatments(self) -> dict[str, Treatment]:
        """What becomes of each boundary layer, by name."""
        return decide_layers(self.layers(), self.settings)

    def request(self, capture: JointCapture, root: nn.Module | None) -> Request:
        """What the graph now being captured is to become; `root` is the module whose frame was captured."""
        layers = self.layers()
        by_id: Mapping[int, BoundaryLayer] = {id(layer.module): layer for layer in layers}
        return Request(
            settings=self.settings,
            layers=by_id,
            treatments=decide_layers(layers, self.settings),
            parameters=capture.parameters,
            mutated=capture.mutated,
            around=_around(self.model, layers, root),
            dump=self._dump if self.settings.debug_dir is not None else None,
        )

    def add(self, record: GraphRecord) -> None:
        """Keep the record of a captured graph."""
        with self.lock:
            self.records.append(record)

    def reset(self, settings: Settings) -> None:
        """Take new settings; graphs captured under the old ones are forgotten."""
        with self.lock:
            self.settings = settings
            self.records.clear()
            self.pending.clear()
            self.compiled.clear()

    def resolve_pending(self) -> None:
        """Capture again, for inspection only, what a compile cache answered."""
        with self.lock:
            waiting, self.pending = self.pending, []
        for again in waiting:
            again()

    def _dump(self, after: str, which: str, gm: fx.GraphModule | None) -> None:
        assert self.settings.debug_dir is not None and gm is not None
        folder = Path(self.settings.debug_dir) / f"graph_{len(self.records):02d}"
        folder.mkdir(parents=True, exist_ok=True)
        number = len(list(folder.iterdir()))
        text = gm.print_readable(print_output=False, include_stride=True)
        (folder / f"{number:02d}_{after}_{which}.txt").write_text(text)


_by_key: dict[str, list[weakref.ref[State]]] = {}
_current = threading.local()


def register(state: State) -> None:
    """Let graphs that carry the key of `state` find it."""
    entries = _by_key.setdefault(state.settings.key(), [])
    entries[:] = [e for e in entries if e() is not None and e() is not state]
    entries.append(weakref.ref(state))


def find(keys: set[str], modules: set[int]) -> State | None:
    """The live state whose key a graph carries; of several, the one whose layers the graph calls."""
    alive = [s for key in sorted(keys) for e in _by_key.get(key, []) if (s := e()) is not None]
    for state in alive:
        if modules & {id(m) for m in state.model.modules()}:
            return state
    return alive[-1] if alive else None


@dataclass(frozen=True)
class Compilation:
    """A graph that this thread is compiling.

    Attributes:
        state: the transformed model it belongs to.
        root: the module whose frame was captured, if known.
        inspect_only: stop, by :class:`Inspected`, once the rewritten graphs are there.
    """

    state: State
    root: nn.Module | None = None
    inspect_only: bool = False


class Inspected(Exception):
    """The rewritten graphs of a capture for inspection are there; nothing more is to be compiled."""


def current() -> Compilation | None:
    """What this thread is compiling for a transformed model, or None."""
    return getattr(_current, "compilation", None)


@contextlib.contextmanager
def compiling(compilation: Compilation) -> Iterator[None]:
    """Within this context this thread is compiling a graph of a transformed model."""
    previous = current()
    _current.compilation = compilation
    try:
        yield
    finally:
        _current.compilation = previous


def _around(model: nn.Module, layers: list[BoundaryLayer], root: nn.Module | None) -> tuple[BoundaryLayer, ...]:
    """The boundary layers that `root`, the module of a captured frame, is or lies in, outermost first.

    A frame of its own starts after a graph break, or where FSDP2 hooks a layer.
    """
    if root is None or root is model:
        return ()
    names = [name for name, module in model.named_modules(remove_duplicate=False) if module is root]
    found = [b for b in layers if any(n == b.name or n.startswith(b.name + ".") for n in names)]
    return tuple(sorted(found, key=lambda b: len(b.name)))
