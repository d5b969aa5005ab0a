"""AOTAutograd and Inductor: the partition of a joint graph, backends, and compile caches."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch._functorch._aot_autograd.graph_compile as _graph_compile
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from functorch.compile import min_cut_rematerialization_partition as min_cut_rematerialization_partition
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import TensorifyState
from torch._dynamo.utils import counters
from torch._guards import TracingContext, tracing
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx.graph import _BoxedCodeGen
from torch.utils._python_dispatch import _disable_current_modes

from fxckpt.torch_private.dynamo import frame_evaluation_paused, source_name
from fxckpt.torch_private.graph_modules import generate_code

Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


@dataclass(frozen=True)
class JointCapture:
    """A joint graph on its way into the partitioner.

    Attributes:
        inputs: the flat inputs (fake tensors), in the order of the graph's first placeholders.
        parameters: for each input, whether it is a module's parameter.
        mutated: for each input, whether the step changes its data.
        given: for each input, whether it is an activation: it gets a gradient, is no parameter, and is not changed.
        fuses: whether Inductor compiles the graphs, and so fuses pointwise operators into what reads them.
    """

    inputs: Sequence[Any]
    parameters: tuple[bool, ...]
    mutated: tuple[bool, ...]
    given: tuple[bool, ...] = ()
    fuses: bool = False


PartitionHook = Callable[
    [fx.GraphModule, JointCapture], "Callable[[Partition, fx.GraphModule, Any, dict[str, Any]], Any] | None"
]
"""``hook(joint graph, capture)`` gives None to leave the graph alone, or ``rewrite(partition, gm, inputs, kwargs)``."""

_original_stage: Callable[..., Any] = _graph_compile._aot_stage2a_partition
_hook: PartitionHook | None = None
_partitioning = threading.local()
"""Whether this thread is in a partition step. Joint graphs that Inductor traces there are patterns it looks for."""


def install_partition_hook(hook: PartitionHook) -> None:
    """Let `hook` see every joint graph before AOTAutograd partitions it, whatever the backend.

    Wraps ``_aot_stage2a_partition``, the one step all AOTAutograd backends share. Graphs for which the hook returns
    None go their ordinary way.
    """
    global _hook
    _hook = hook
    _graph_compile._aot_stage2a_partition = cast("Any", _partition_stage)


@functools.wraps(_original_stage)
def _partition_stage(
    fx_g: fx.GraphModule, joint_inputs: Any, subclass_meta: Any, fw_metadata: Any, aot_config: Any, *rest: Any
) -> Any:
    partition: Partition = rest[0] if rest else aot_config.partition_fn
    rewrite = None
    if _hook is not None and not getattr(_partitioning, "now", False):
        rewrite = _hook(fx_g, _describe_capture(joint_inputs, fw_metadata, aot_config, partition))
    if rewrite is None:
        return _original_stage(fx_g, joint_inputs, subclass_meta, fw_metadata, aot_config, *rest)

    if not functorch_config.donated_buffer:
        fw_metadata.bw_donated_idxs = []  # left at None, it counts as donated where retain_graph=True asks

    def replaced(gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        _partitioning.now = True
        try:
            if is_inductor_partition(partition):
                owner = _InductorPartitioner(rewrite, inductor_config.custom_partitioner_fn)
                with inductor_config.patch(custom_partitioner_fn=owner):
                    return partition(gm, inputs, **kwargs)
            return rewrite(min_cut_rematerialization_partition, gm, inputs, kwargs)
        finally:
            _partitioning.now = False

    if rest:
        return _original_stage(fx_g, joint_inputs, subclass_meta, fw_metadata, aot_config, replaced, *rest[1:])
    aot_config.partition_fn = replaced  # torch 2.11 keeps the partitioner in the config
    try:
        return _original_stage(fx_g, joint_inputs, subclass_meta, fw_metadata, aot_config)
    finally:
        aot_config.partition_fn = partition


def is_inductor_partition(partition: Partition) -> bool:
    """Whether `partition` is Inductor's own partition step (its joint-graph passes, then a partitioner)."""
    inner = partition
    while isinstance(inner, functools.partial):
        inner = inner.func
    return getattr(inner, "__module__", "") == "torch._inductor.compile_fx"


class _InductorPartitioner(CustomPartitionerFn):
    """Stands in Inductor's config for the length of one partition step, after its joint-graph passes."""

    def __init__(self, rewrite: Callable[..., Any], previous: Any) -> None:
        self.rewrite = rewrite
        self.previous = previous

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        partition = self.previous or min_cut_rematerialization_partition
        return self.rewrite(partition, gm, joint_inputs, kwargs)

    def uuid(self) -> Any:
        return None


def saving_least(wanted: bool) -> AbstractContextManager[object]:
    """While it is open, and `wanted`, the partitioner may recompute what the backward hands to a matrix product.

    By default it saves such a value although it is a pointwise function of others that it saves, too (the activation
    function's result beside its input): the backward would write it to memory, and so gain no time. It gains memory.
    """
    wants: AbstractContextManager[object] = functorch_config.patch(ban_recompute_materialized_backward=False)
    return wants if wanted else contextlib.nullcontext()


def running_for_real() -> AbstractContextManager[object]:
    """While it is open, operators run, rather than being traced or run on fake tensors."""
    opened: AbstractContextManager[object] = _disable_current_modes()
    return opened


def _describe_capture(joint_inputs: Any, fw_metadata: Any, aot_config: Any, partition: Partition) -> JointCapture:
    inputs = list(joint_inputs[0] if isinstance(joint_inputs, tuple) else joint_inputs)
    sources = aot_config.aot_autograd_arg_pos_to_source or []
    static = set(fw_metadata.static_input_indices or ())
    parameters = []
    for i, item in enumerate(inputs):
        if i < len(sources) and sources[i] is not None:
            parameters.append("_parameters[" in source_name(sources[i]))
        else:  # from no Dynamo, or from another part of a graph that DDP's buckets split
            parameters.append(isinstance(item, nn.Parameter) or i in static)
    info = fw_metadata.input_info
    mutated = [i < len(info) and bool(info[i].mutates_data) for i in range(len(inputs))]
    given = [
        i < len(info) and bool(info[i].requires_grad) and not (fixed or changed or isinstance(inputs[i], nn.Parameter))
        for i, (fixed, changed) in enumerate(zip(parameters, mutated, strict=True))
    ]
    return JointCapture(inputs, tuple(parameters), tuple(mutated), tuple(given), is_inductor_partition(partition))


def aot_backend(
    forward: Callable[..., Any], backward: Callable[..., Any], gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> Any:
    """Trace `gm` to a joint graph, partition it, and compile both halves with the given compilers.

    Donated buffers are off: they would forbid a second backward with ``retain_graph=True``.
    """
    with functorch_config.patch(donated_buffer=False):
        backend = aot_autograd(
            fw_compiler=forward,
            bw_compiler=backward,
            partition_fn=min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,
        )
        return backend(gm, list(example_inputs))


def boxed(gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """`gm` as a function of ONE list of inputs, which it empties, so that each value is freed after its last use."""
    gm.graph.set_codegen(_BoxedCodeGen())
    generate_code(gm)
    forward = gm.forward

    def run(args: list[Any]) -> Any:
        return forward(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@contextlib.contextmanager
def taken_as_random(operators: Mapping[torch._ops.OpOverload, bool]) -> Iterator[None]:
    """Within this context PyTorch's partitioner takes each of `operators` to draw random numbers, or not to.

    What it takes to draw and recomputes is run again under the random state of its first run.
    """
    seeded = torch.Tag.nondeterministic_seeded
    before = {op: op._tags for op in operators}
    for op, random in operators.items():
        op._tags = [tag for tag in op.tags if tag != seeded] + [seeded] * random
    try:
        yield
    finally:
        for op, tags in before.items():
            op._tags = tags


def cache_hits() -> int:
    """How often AOTAutograd's cache has answered in this process."""
    return int(counters["aot_autograd"]["autograd_cache_hit"])


@dataclass(frozen=True)
class CaptureContext:
    """What a graph was captured under, kept to capture it again: tracing context and autocast state."""

    tracing: Any
    autocast: tuple[tuple[str, torch.dtype], ...]

    @classmethod
    def now(cls) -> CaptureContext:
        """Of the capture under way."""
        on = [d for d in torch._C._autocast_supported_devices() if torch.is_autocast_enabled(d)]
        return cls(TracingContext.try_get(), tuple((d, torch.get_autocast_dtype(d)) for d in on))

    def again(self, capture: Callable[[], object]) -> None:
        """Call `capture`, which captures the graph as then, and asks no cache.

        It is called once more where PyTorch starts over to take some numbers as constants, as Dynamo does.
        """
        constants = TensorifyState.force_specializations
        before, seen = set(constants), -1
        with self._restored():
            try:
                while True:
                    try:
                        capture()
                        return
                    except TensorifyScalarRestartAnalysis:
                        if len(constants) == seen:
                            raise
                        seen = len(constants)
            finally:
                constants.intersection_update(before)

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(frame_evaluation_paused())
            stack.enter_context(tracing(self.tracing))
            stack.enter_context(inductor_config.patch(force_disable_caches=True))
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype))
            yield


def prepare(backend: Callable[..., Any]) -> None:
    """Begin what Inductor does once a process before its first C++ kernel, while the graph is still being captured.

    To learn which vector instructions it may use it compiles and loads test programs, and waits for the compiler: some
    seconds with an empty cache. Here a thread waits; who comes to need the answer before it is there asks anew.
    """
    if isinstance(backend, torch._TorchCompileInductorWrapper):
        _probe_vector_instructions()


@functools.cache
def _probe_vector_instructions() -> None:
    # All that the probe imports, so that the thread imports nothing.
    from torch._inductor import codecache, cpp_builder, cpu_vec_isa  # noqa: F401

    def probe() -> None:
        with contextlib.suppress(Exception):  # whoever needs the answer meets the same error
            cpu_vec_isa.pick_vec_isa()

    threading.Thread(target=probe, name="fxckpt-vector-instructions", daemon=True).start()


def with_inductor_options(backend: Callable[..., Any], defaults: dict[str, Any]) -> Callable[..., Any]:
    """`backend` with further Inductor options where it is ``torch.compile``'s Inductor; the user's own options win."""
    if not isinstance(backend, torch._TorchCompileInductorWrapper):
        return backend
    made = copy.copy(backend)
    made.config = {**defaults, **backend.config}
    return made


def hooks_on_saved_tensors() -> bool:
    """Whether hooks (``torch.autograd.graph.saved_tensors_hooks``) now get what autograd saves, and may copy it.

    Those of ``torch.utils.checkpoint`` do not.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return bool(hooks) and getattr(hooks[0], "__module__", "") != "torch.utils.checkpoint"


def is_inductor(backend: Callable[..., Any]) -> bool:
    """Whether `backend` is ``torch.compile``'s Inductor."""
    return isinstance(backend, torch._TorchCompileInductorWrapper)


def wants_cuda_graphs(backend: Callable[..., Any]) -> bool:
    """Whether `backend` is ``torch.compile``'s Inductor, told to record CUDA graphs (``mode="reduce-overhead"``)."""
    if not isinstance(backend, torch._TorchCompileInductorWrapper):
        return False
    return bool(backend.config.get("triton.cudagraphs", inductor_config.triton.cudagraphs))
