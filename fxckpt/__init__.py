"""fxckpt: train big PyTorch models in less memory by rewriting the training step's graph."""

from fxckpt.capture.names import name
from fxckpt.config import VERSION as __version__
from fxckpt.config import Offload
from fxckpt.decide.layers import GradientCheckpointingLayer
from fxckpt.decide.plan import Plan
from fxckpt.decide.policy import Treatment, either, every_n, names
from fxckpt.errors import (
    BackendError,
    BudgetError,
    CaptureError,
    FxckptError,
    NoLayersError,
    SettingsError,
    TransferError,
    UnsupportedError,
    VerifyError,
)
from fxckpt.inspection import explain, graphs, selected_layers, stats, to_networkx
from fxckpt.planning import chosen_plan, plan, sweep
from fxckpt.runtime.stats import TransferStats
from fxckpt.show.sweep import Sweep
from fxckpt.transform import transform

__all__ = [
    "BackendError",
    "BudgetError",
    "CaptureError",
    "FxckptError",
    "GradientCheckpointingLayer",
    "NoLayersError",
    "Offload",
    "Plan",
    "SettingsError",
    "Sweep",
    "TransferError",
    "TransferStats",
    "Treatment",
    "UnsupportedError",
    "VerifyError",
    "__version__",
    "chosen_plan",
    "either",
    "every_n",
    "explain",
    "graphs",
    "name",
    "names",
    "plan",
    "selected_layers",
    "stats",
    "sweep",
    "to_networkx",
    "transform",
]
