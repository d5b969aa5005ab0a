"""What a transformed model knows: its original, its settings, and the graphs captured from it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from torch import fx, nn

from fxckpt.capture.regions import BoundaryLayer
from fxckpt.config import Settings
from fxckpt.decide.device import measured_key
from fxckpt.decide.layers import boundary_layers
from fxckpt.decide.plan import Plan
from fxckpt.decide.policy import Treatment, decide_layers
from fxckpt.errors import CaptureError
from fxckpt.pipeline import Request
from fxckpt.record import Frame, GraphRecord
from fxckpt.runtime.stats import TransferStats
from fxckpt.runtime.store import Store, shared
from fxckpt.torch_private import CaptureContext, JointCapture, captured_function


@dataclass
class Width:
    """How much of a call Dynamo captures: what it does by default, or more (``torch_private.capturing``).

    Attributes:
        widely: whether more.
        is_open: whether the other of the two may be tried where this one fails.
    """

    widely: bool
    is_open: bool = True


@dataclass(eq=False)
class State:
    """Of one transformed model.

    Attributes:
        model: the original model, whose modules and parameters the transformed one shares.
        settings: what was asked for.
        records: one for each captured graph, in order of capture.
        pending: captures that a compile cache answered; each leaves its record when called.
        key: text that names the settings and what becomes of each layer, for compile caches.
        number: this state's own in this process, for annotations.
        captures: joint graphs seen so far, rewritten or about to be.
        found: whether a call of a layer that is to be recomputed was seen in one of them.
        calls: calls of the model with gradients so far.
        plain_width: of calls outside ``torch.compile``.
        compiled_width: of calls under ``torch.compile``, which should have the graphs of the original model there.
        inlined: number of the last compilation that had the model inside somebody else's frame.
        store: its transfers.
        plan: what was chosen to keep the budget, from the first call on.
        joints: the captured joint graphs as they came, kept where somebody wants to rewrite them once more.
    """

    model: nn.Module
    settings: Settings
    records: list[GraphRecord] = field(default_factory=list)
    pending: list[Callable[[], None]] = field(default_factory=list)
    compiled: dict[Any, Callable[..., Any]] = field(default_factory=dict)
    captures: int = 0
    found: bool = False
    calls: int = 0
    plain_width: Width = field(default_factory=lambda: Width(widely=True))
    compiled_width: Width = field(default_factory=lambda: Width(widely=False))
    inlined: str = ""
    lock: threading.RLock = field(default_factory=threading.RLock)
    plan: Plan | None = None
    joints: list[Joint] | None = None
    _patterns: dict[int, tuple[Treatment | None, ...]] = field(default_factory=dict)
    key: str = field(init=False)
    store: Store = field(init=False)
    number: int = field(default_factory=lambda: next(_numbers))

    def __post_init__(self) -> None:
        self.key = self._make_key()
        self.store = self._make_store()
        _by_number[self.number] = self

    def width(self, plain: bool) -> Width:
        """How widely calls outside ``torch.compile``, or under it, are captured."""
        return self.plain_width if plain else self.compiled_width

    def _make_store(self) -> Store:
        offload = self.settings.offload
        return Store(checksum=self.settings.verify, prefetch=1 if offload is None else offload.prefetch)

    def layers(self) -> list[BoundaryLayer]:
        """The model's boundary layers as it is now."""
        return boundary_layers(self.model, self.settings.layers)

    def treatments(self) -> dict[str, Treatment]:
        """What becomes of each boundary layer, by name; all are recomputed until a budget has been planned for."""
        return decide_layers(self.layers(), self.settings)

    def treatment_pattern(self, module: nn.Module) -> tuple[Treatment | None, ...]:
        """What becomes of the boundary layers around and inside `module`: frames of alike modules differ in this."""
        with self.lock:
            if id(module) not in self._patterns:  # also after the model got new modules, such as adapters
                chosen = {id(layer.module): treatment for layer, treatment in self._treated()}
                around: dict[int, tuple[Treatment | None, ...]] = {}
                for name, inner in self.model.named_modules(remove_duplicate=False):
                    parent = around.get(id(self.model.get_submodule(name.rpartition(".")[0])), ()) if name else ()
                    own = (chosen[id(inner)],) if id(inner) in chosen else ()
                    around.setdefault(id(inner), parent + own)
                for inner in self.model.modules():
                    inside = tuple(chosen.get(id(m)) for m in inner.modules() if id(m) in chosen and m is not inner)
                    self._patterns[id(inner)] = (*around[id(inner)], None, *inside)
            return self._patterns.get(id(module), ())

    def _make_key(self) -> str:
        measured = "" if self.settings.offload is None else measured_key()
        return f"{self.settings.key()} {measured} {self._pattern_text(self.model)}"

    def frame_key(self, root: nn.Module | None, reached: Mapping[str, nn.Module]) -> str:
        """The key of a graph captured from a frame of `root`: alike layers, kept or recomputed, have equal graphs.

        So have those that a frame reaches in other ways, as by an argument; `reached` has all by how that is.
        """
        parts = {"": root} | {how: module for how, module in reached.items() if module is not root}
        texts = [f" {n}{self._pattern_text(m)}" for n, m in parts.items() if m is not None and m is not self.model]
        return self.key + "".join(texts)

    def _pattern_text(self, module: nn.Module) -> str:
        return "".join("/" if t is None else f"{t.text};" for t in self.treatment_pattern(module))

    def _treated(self) -> list[tuple[BoundaryLayer, Treatment]]:
        layers = self.layers()
        chosen = decide_layers(layers, self.settings)
        return [(layer, chosen[layer.name]) for layer in layers]

    @functools.cached_property
    def recurrent(self) -> bool:
        """Whether a boundary layer is, or holds, one of ``torch.nn``'s recurrent modules."""
        return any(isinstance(m, nn.RNNBase) for layer in self.layers() for m in layer.module.modules())

    def request(self, capture: JointCapture, root: nn.Module | None, frame: Frame) -> Request:
        """What the graph now being captured is to become; `root` is the module whose `frame` was captured."""
        layers = self.layers()
        by_id: Mapping[int, BoundaryLayer] = {id(layer.module): layer for layer in layers}
        return Request(
            settings=self.settings,
            layers=by_id,
            treatments=decide_layers(layers, self.settings),
            parameters=capture.parameters,
            mutated=capture.mutated,
            given=capture.given,
            fuses=capture.fuses,
            around=_around(self.model, layers, root),
            frame=frame,
            dump=self._dump if self.settings.debug_dir is not None else None,
        )

    def frame(self, root: nn.Module | None, inlined: bool = False) -> Frame:
        """The frame that Dynamo is compiling now, whose ``self`` is `root`.

        `inlined` says that the model is called in a frame of somebody else's: then each compilation stands for a call.
        """
        function, compile_id = captured_function()
        if inlined and compile_id != self.inlined:
            self.calls, self.inlined = self.calls + 1, compile_id
        name = next((n for n, module in self.model.named_modules() if module is root), "")
        return Frame(function, name, compile_id, self.calls)

    def add(self, record: GraphRecord) -> None:
        """Keep the record of a captured graph."""
        with self.lock:
            self._reserve(record)
            if self.settings.debug_dir is not None:
                self._write("seconds.txt", "".join(f"{s:.6f} {name}\n" for name, s in record.seconds.items()))
            self.records.append(record)

    def transfer_stats(self) -> TransferStats:
        """Figures of the last step's transfers."""
        offload = self.settings.offload
        return (shared(offload.place) if offload is not None and self.inlined else self.store).stats()

    def _reserve(self, record: GraphRecord) -> None:
        """See that a step's offloads have room, with those of the other graphs captured in this call."""
        if self.settings.offload is not None and record.transfers:
            together = [record, *(r for r in self.records if r.frame.call == record.frame.call)]
            self.store.reserve(self.settings.offload.place, sum(r.offloaded_bytes for r in together))

    def reset(self, settings: Settings) -> None:
        """Take new settings; graphs captured under the old ones are forgotten.

        Those of a rewrite that is switched off for a while, as preference training does for its reference, are kept.
        """
        with self.lock:
            alike = replace(settings, enabled=self.settings.enabled) == self.settings
            self.settings = settings
            if alike:
                return
            self.store = self._make_store()
            self._patterns.clear()
            self.key = self._make_key()
            self.captures = 0
            self.found = False
            self.records.clear()
            self.pending.clear()
            self.compiled.clear()

    def keep_budget(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, compiled: bool) -> None:
        """Choose what becomes of each layer, so that a step with these arguments keeps the budget; once.

        Raises:
            BudgetError: no choice keeps it.
            CaptureError: the step cannot be captured without running it.
        """
        with self.lock:
            if self.settings.budget is None or planner is None:
                return
            batch = _by_name(self.model, args, kwargs)
            self.plan = planner(self.model, batch, self.settings, compiled)
            self.reset(replace(self.settings, budget=None, policy=self.plan.policy))

    def resolve_pending(self) -> None:
        """Capture again, for inspection only, what a compile cache answered."""
        with self.lock:
            waiting, self.pending = self.pending, []
        for again in waiting:
            again()

    def _dump(self, after: str, which: str, gm: fx.GraphModule | None) -> None:
        assert gm is not None
        self._write(f"{{number:02d}}_{after}_{which}.txt", gm.print_readable(print_output=False, include_stride=True))

    def _write(self, name: str, text: str) -> None:
        """Write a file of the graph now being captured; ``{number}`` in its name counts the files."""
        assert self.settings.debug_dir is not None
        folder = Path(self.settings.debug_dir) / f"graph_{len(self.records):02d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name.format(number=len(list(folder.iterdir())))).write_text(text)


def _by_name(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names."""
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            found |= value
        elif kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            raise CaptureError(
                f"fxckpt: budget= plans a call by the names of its arguments, and {type(model).__name__} takes {name} "
                "by its place alone. Give it a name, or choose every_n= or policy=."
            )
        else:
            found[name] = value
    return found


Planner: TypeAlias = Callable[[nn.Module, Mapping[str, Any], Settings, bool], Plan]
planner: Planner | None = None
"""Plans a step within its settings' budget, compiled or not. It captures, so it makes views; ``transform`` sets it."""

_numbers: itertools.count[int] = itertools.count()
_by_number: weakref.WeakValueDictionary[int, State] = weakref.WeakValueDictionary()
_current = threading.local()


def find(number: int) -> State | None:
    """The live state that a graph's nodes are annotated with."""
    return _by_number.get(number)


@dataclass(frozen=True)
class Compilation:
    """A graph that this thread is compiling.

    Attributes:
        state: the transformed model it belongs to.
        root: the module whose frame was captured, if known.
        frame: that frame.
        inspect_only: stop, by :class:`Inspected`, once the rewritten graphs are there.
        inlined: the model is called inside somebody else's frame.
    """

    state: State
    root: nn.Module | None = None
    frame: Frame = field(default_factory=Frame)
    inspect_only: bool = False
    inlined: bool = False


@dataclass(frozen=True)
class Joint:
    """A captured joint graph before any pass, and what rewriting it takes.

    Attributes:
        compilation: what was being compiled.
        capture: what AOTAutograd told of it.
        context: what it was captured under.
        partition: PyTorch's partitioner.
        graph: the graph; rewriting works on a copy.
        inputs: its inputs, for the partitioner.
        options: the partitioner's options.
    """

    compilation: Compilation
    capture: JointCapture
    context: CaptureContext
    partition: Callable[..., Any]
    graph: fx.GraphModule
    inputs: Any
    options: Mapping[str, Any]


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
    """The boundary layers that `root`, the module a captured frame belongs to, is or lies in, outermost first.

    A frame of its own starts after a graph break, or where FSDP2 hooks a layer.
    """
    if root is None:
        return ()
    names = [name for name, module in model.named_modules(remove_duplicate=False) if module is root]
    found = [b for b in layers if any(not b.name or n == b.name or n.startswith(b.name + ".") for n in names)]
    return tuple(sorted(found, key=lambda b: len(b.name)))
