"""The one place that reaches PyTorch's private parts; a new PyTorch release breaks this place or none.

Each function says what it stands on. Written for torch 2.11 to 2.14.
"""

from torch._C._dynamo.eval_frame import set_eval_frame as set_eval_frame

from fxckpt.torch_private.aot import (
    CaptureContext,
    JointCapture,
    Partition,
    aot_backend,
    boxed,
    cache_hits,
    install_partition_hook,
    min_cut_rematerialization_partition,
    prepare,
    taken_as_random,
    with_inductor_options,
)
from fxckpt.torch_private.dynamo import (
    RecompileLimit,
    UserBackend,
    active_modules,
    bypassing_stance,
    captured_function,
    captured_root_module,
    capturing,
    compile_frame,
    copy_captured,
    depends_on_data,
    frames_seen,
    guard_root_module,
    is_capture_failure,
    next_sequence_number,
    own_error,
    recompile_limit,
    run_natively,
    user_backend,
)
from fxckpt.torch_private.measure import captured_graphs, memory_after, set_activation_memory_budget

__all__ = [
    "CaptureContext",
    "JointCapture",
    "Partition",
    "RecompileLimit",
    "UserBackend",
    "active_modules",
    "aot_backend",
    "boxed",
    "bypassing_stance",
    "cache_hits",
    "captured_function",
    "captured_graphs",
    "captured_root_module",
    "capturing",
    "compile_frame",
    "copy_captured",
    "depends_on_data",
    "frames_seen",
    "guard_root_module",
    "install_partition_hook",
    "is_capture_failure",
    "memory_after",
    "min_cut_rematerialization_partition",
    "next_sequence_number",
    "own_error",
    "prepare",
    "recompile_limit",
    "run_natively",
    "set_activation_memory_budget",
    "set_eval_frame",
    "taken_as_random",
    "user_backend",
    "with_inductor_options",
]
