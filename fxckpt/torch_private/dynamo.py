"""Dynamo: frames, their backends, and the module whose frame is being captured."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.eval_frame as _eval_frame
from torch import fx, nn
from torch._C._autograd import _get_sequence_nr
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo.convert_frame import ConvertFrameAssert
from torch._dynamo.eval_frame import _optimize, innermost_backend, skip_code
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.source import LocalSource
from torch._dynamo.utils import counters
from torch._guards import CompileContext, Guard, TracingContext
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fxckpt import graph
from fxckpt.torch_private.graph_modules import snapshot
from fxckpt.torch_private.ranks import buckets_too_small


def run_natively(function: Callable[..., Any]) -> None:
    """Make Dynamo run `function`'s own frame as plain Python, and still look at the frames it calls.

    A call of it inside a frame that Dynamo is tracing is inlined as usual.
    """
    skip_code(function.__code__)


@contextlib.contextmanager
def frame_evaluation_paused() -> Iterator[Any]:
    """Within this context Dynamo looks at no frame; gives the callback that was active (None or False: none)."""
    callback = set_eval_frame(None)
    try:
        yield callback
    finally:
        set_eval_frame(callback)


@dataclass(frozen=True)
class UserBackend:
    """What the active ``torch.compile`` call was given.

    Attributes:
        compile: the backend, a callable ``(gm, example_inputs) -> callable``.
        fullgraph: whether a graph break is an error.
        recompile_limit: its own recompile limit, or None.
    """

    compile: Callable[..., Any]
    fullgraph: bool
    recompile_limit: int | None


def user_backend(callback: Any) -> UserBackend | None:
    """The backend behind Dynamo's frame evaluation callback; None outside ``torch.compile``."""
    if not callable(callback):
        return None
    fullgraph, limit, step = False, None, callback
    while hasattr(step, "_torchdynamo_orig_backend"):
        if isinstance(step, ConvertFrameAssert):
            fullgraph = step._one_graph
        limit = getattr(step, "_recompile_limit", None) or limit
        step = step._torchdynamo_orig_backend
    return UserBackend(innermost_backend(callback), fullgraph, limit)


def compile_frame(
    function: Callable[..., Any],
    backend: Callable[..., Any],
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    recompile_limit: int | None = None,
    afresh: bool = False,
) -> Callable[..., Any]:
    """`function` compiled by Dynamo with `backend`; `dynamic` as in ``torch.compile``.

    The result counts its recompilations for itself: several transforms of models of one class do not use up each
    other's recompile limit. With `afresh` Dynamo does not know either that it could not compile the function before:
    it leaves alone what breaks a graph in a loop, under any configuration.
    """
    options: dict[str, Any] = {"nopython": fullgraph, "dynamic": dynamic}
    known = inspect.signature(_optimize).parameters
    if recompile_limit is not None and "recompile_limit" in known:
        options["recompile_limit"] = recompile_limit
    if "isolate_recompiles" in known:
        options["isolate_recompiles"] = True
    else:  # before torch 2.13: a code object of its own has a cache of its own
        afresh = True
    if afresh and isinstance(function, types.FunctionType):
        function = _with_own_code(function)
    compiled: Callable[..., Any] = torch._dynamo.optimize(backend, **options)(function)
    return compiled


def _with_own_code(function: types.FunctionType) -> types.FunctionType:
    made = types.FunctionType(
        function.__code__.replace(co_name=function.__code__.co_name),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(made, function)
    return made


def bypassing_stance() -> str | None:
    """The ``torch.compiler.set_stance`` now in force, if under it Dynamo may run a frame without our backend."""
    stance = _eval_frame._stance
    if stance.stance in ("default", "fail_on_recompile") and stance.backend is None:
        return None
    backend = "" if stance.backend is None else f", backend={stance.backend!r}"
    return f"{stance.stance!r}{backend}"


@contextlib.contextmanager
def capturing(recurrent: bool, widely: bool, hooks: bool) -> Iterator[None]:
    """Within this context Dynamo raises :class:`RecompileLimit` where it would give up a frame and run it plainly.

    Args:
        recurrent: let Dynamo trace ``torch.nn``'s recurrent modules, which it leaves out of graphs by default.
        widely: capture more than Dynamo does by default: numbers read from tensors (``item()``), operators whose shapes
            depend on data (``nonzero()``), and whole numbers that a module changes from call to call, such as a step
            counter, as values and not as constants.
        hooks: see also hooks that modules are given after the capture, which Dynamo does not look for by default.
    """
    changes = {"fail_on_recompile_limit_hit": True, "suppress_errors": False}
    if recurrent:
        changes["allow_rnn"] = True
    if hooks:
        changes["skip_nnmodule_hook_guards"] = False
    if widely:
        changes |= {
            "allow_unspec_int_on_nn_module": True,
            "capture_scalar_outputs": True,
            "capture_dynamic_output_shape_ops": True,
        }
    if buckets_too_small():
        changes["optimize_ddp"] = False
    if hasattr(torch._dynamo.config, "invalidate_compile_context_weakrefs"):
        changes["invalidate_compile_context_weakrefs"] = True  # else what is captured can't be swapped (swap_tensors)
    with torch._dynamo.config.patch(changes):
        try:
            yield
        except FailOnRecompileLimitHit as error:
            raise RecompileLimit(str(error).splitlines()[0]) from None


def recompile_limit() -> int:
    """How often Dynamo compiles one frame before it gives up, by its configuration."""
    return int(torch._dynamo.config.recompile_limit)


def frames_seen() -> int:
    """How many frames Dynamo has tried to compile in this process."""
    return int(counters["frames"]["total"])


def next_sequence_number() -> int:
    """The number of the next autograd node made on this thread; nodes made earlier have smaller ones."""
    return int(_get_sequence_nr())


def is_capture_failure(error: BaseException) -> bool:
    """Whether Dynamo raised `error` because it cannot capture the code, and not the code itself."""
    return isinstance(error, TorchDynamoException) and not isinstance(error, BackendCompilerFailed)


def depends_on_data(error: BaseException) -> bool:
    """Whether a graph could not be made because it would have to ask for a size or number that only its data tell."""
    inner = getattr(error, "inner_exception", None) or error
    return isinstance(inner, GuardOnDataDependentSymNode)


class RecompileLimit(Exception):
    """Dynamo would have given up compiling a frame."""


def captured_root_module() -> nn.Module | None:
    """The module whose method's frame Dynamo is compiling right now, if it is a module's.

    A layer called after a graph break is the root of its own graph and stands in no node's module stack.
    """
    found = _root_local()
    return found[1] if found else None


def _root_local() -> tuple[str, nn.Module] | None:
    """Name and value of the local variable that is the ``self`` of the frame being compiled."""
    translator = _root_translator()
    values = dict(getattr(translator, "f_locals", {}))
    code = getattr(translator, "f_code", None)
    first = code.co_varnames[0] if code is not None and code.co_argcount else ""
    for name in (first, "self"):
        if isinstance(values.get(name), nn.Module):
            return name, values[name]
    # A frame that goes on after a graph break has the old locals in another order: self holds the other modules.
    modules = [(name, value) for name, value in values.items() if isinstance(value, nn.Module)]
    return max(modules, key=lambda item: sum(1 for _ in item[1].modules()), default=None)


def active_modules() -> list[nn.Module]:
    """The modules whose calls are under way on this thread outside captured frames, innermost first."""
    found: list[nn.Module] = []
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_call_impl" and isinstance(module := frame.f_locals.get("self"), nn.Module):
            found.append(module)
        frame = frame.f_back
    return found


def captured_function() -> tuple[str, str]:
    """The function whose frame Dynamo is compiling, as ``model.py:12 in forward``, and the compilation's number.

    Numbers are those in PyTorch's logs, ``"0/1"``. Both are empty where nothing is being compiled.
    """
    code = getattr(_root_translator(), "f_code", None)
    name = f"{Path(code.co_filename).name}:{code.co_firstlineno} in {code.co_name}" if code is not None else ""
    number = CompileContext.current_compile_id()
    return name, "" if number is None else str(number)


def _root_translator() -> Any:
    """The translator of the outermost frame, from the ``OutputGraph`` on the Python stack; None outside Dynamo."""
    frame = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if type(owner).__name__ == "OutputGraph":
            return getattr(owner, "root_tx", None)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def guard_modules(make_check: Callable[[nn.Module], Callable[[Any], bool] | None], text: str) -> dict[str, nn.Module]:
    """Let Dynamo reuse the frame it is compiling only with modules that pass a check.

    Frames of their own (after a graph break) are compiled once for all modules of a class that look alike, be it the
    one whose method it is, one that is an argument, or one that is reached through another object.

    Args:
        make_check: called with each module that the frame reaches but by way of a guarded one; gives what is called
            with the module before each reuse, or None where any module will do.
        text: what Dynamo's logs call the guard.

    Returns:
        The guarded modules by how the frame reaches them, such as ``L['self']``, in an order that depends on that only.
    """
    context, root = TracingContext.try_get(), _root_local()
    if context is None:
        return {}
    guards = context.guards_context.dynamo_guards
    sources = {source_name(g.originating_source): g.originating_source for g in list(guards)}
    if root is not None:
        sources = {f"L[{root[0]!r}]": LocalSource(root[0], is_input=True), **sources}
    translator = _root_translator()
    places = {"L": getattr(translator, "f_locals", {}), "G": getattr(translator, "f_globals", {})}
    covered: dict[str, nn.Module] = {}
    for name, source in sorted(sources.items(), key=lambda item: (len(item[0]), item[0])):
        if any(name.startswith((f"{outer}.", f"{outer}[")) for outer in covered):
            continue
        module = _reached(name, places)
        if module is None:
            continue
        check = make_check(module)
        if check is not None:
            covered[name] = module
            guards.add(Guard(source, _checked_by(check, text)))
    return covered


def _reached(name: str, places: dict[str, Any]) -> nn.Module | None:
    """The module that a source's name, a Python expression over local and global names, stands for, or None."""
    try:
        found = eval(name, dict(places))
    except Exception:  # names of what Dynamo makes itself are no such expressions
        return None
    return found if isinstance(found, nn.Module) else None


def _checked_by(check: Callable[[Any], bool], text: str) -> Callable[[Any, Guard], None]:
    def module_guard(builder: Any, guard: Guard) -> None:
        builder.get_guard_manager(guard).add_lambda_guard(check, [text], None)

    return module_guard


def source_name(source: Any) -> str:
    """Where Dynamo finds an input, such as ``L['self']._parameters['weight']``."""
    name = source.name  # a method up to torch 2.9, a property since
    return str(name() if callable(name) else name)


def copy_captured(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph that Dynamo captured, which still says where in the model each input comes from."""
    copied = snapshot(gm)
    for old, new in zip(graph.placeholders(gm.graph), graph.placeholders(copied.graph), strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    for name in ("_param_name_to_source", "_source_to_user_stacks"):
        if hasattr(gm, name):
            object.__setattr__(copied, name, getattr(gm, name))
    return copied


def own_error(error: BaseException, kind: type[BaseException]) -> BaseException | None:
    """The error of `kind` that Dynamo wrapped because it was raised inside a backend, or None."""
    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(inner, kind) else None
