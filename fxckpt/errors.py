"""Every error fxckpt raises.

FxckptError
├── SettingsError      a setting has a value that means nothing
├── NoLayersError      no boundary layer was found, or a name, class or predicate matches none
├── BudgetError        no choice of treatments keeps the budget
├── CaptureError       the training step was not captured, so the rewrite could not be applied
├── BackendError       the torch.compile backend does not run the rewrite
├── UnsupportedError   something asked of a rewritten graph that it cannot do (double backward, ...)
├── TransferError      an offload or a reload failed
└── VerifyError        a rewritten graph breaks an invariant: a bug in fxckpt or in a user's policy or pass
"""

from __future__ import annotations


class FxckptError(RuntimeError):
    """Base class of all errors raised by fxckpt."""


class SettingsError(FxckptError, ValueError):
    """A setting has a value that means nothing."""


class NoLayersError(FxckptError):
    """No boundary layer was found, or a name pattern, class or predicate matches none."""


class BudgetError(FxckptError):
    """No choice of treatments keeps the budget."""


class CaptureError(FxckptError):
    """The training step was not captured as a graph, so the rewrite could not be applied."""


class BackendError(FxckptError):
    """The ``torch.compile`` backend does not run the rewrite."""


class UnsupportedError(FxckptError):
    """Something was asked of a rewritten graph that it cannot do."""


class TransferError(FxckptError):
    """An offload or a reload failed."""


class VerifyError(FxckptError):
    """A rewritten graph breaks an invariant."""
