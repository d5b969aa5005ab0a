"""What a transformed model tells of itself: the graphs captured from it, and what they save, move and recompute."""

from __future__ import annotations

from typing import Any

from torch import nn

from fxckpt.errors import CaptureError
from fxckpt.record import GraphRecord
from fxckpt.runtime.stats import TransferStats
from fxckpt.show import network
from fxckpt.show.data import Explanation
from fxckpt.show.explain import explain_records
from fxckpt.use.view import state_of


def selected_layers(transformed: nn.Module) -> list[str]:
    """Qualified names of the boundary layers that are recomputed, in the order of ``model.modules()``.

    Raises:
        CaptureError: a budget is to be kept, and nothing has been called yet.
        FxckptError: not a transformed model.
    """
    state = state_of(transformed)
    if state.settings.budget is not None:
        raise CaptureError("With budget= the first call chooses the layers: call t(**batch) with gradients on first.")
    chosen = state.treatments()
    return [name for name, treatment in chosen.items() if treatment.recompute]


def stats(transformed: nn.Module) -> TransferStats:
    """What the transfers of the last step moved, how long that took, and how much was held.

    A step is a call of the model with gradients on and the backward that belongs to it; ask after the backward.

    Example::

        t(**batch).loss.backward()
        print(fxckpt.stats(t).stall_seconds)

    Args:
        transformed: what :func:`transform` returned, compiled or wrapped or not.

    Raises:
        FxckptError: not a transformed model.
    """
    return state_of(transformed).transfer_stats()


def graphs(transformed: nn.Module) -> list[GraphRecord]:
    """One record for each graph captured so far, in order of capture.

    A record has ``.forward`` and ``.backward`` (the rewritten graphs, each a ``torch.fx.GraphModule``), ``.joint`` (the
    captured graph before any pass), ``.regions``, ``.plan``, and ``.frame`` (the Python function it was captured from).

    Args:
        transformed: what :func:`transform` returned, compiled or wrapped or not.

    Raises:
        CaptureError: nothing has been captured yet, or checkpointing is switched off.
        FxckptError: not a transformed model.
    """
    state = state_of(transformed)
    state.resolve_pending()
    if not state.records or not state.settings.enabled:
        name = type(state.model).__name__
        raise CaptureError(
            f"No graph of {name} has been captured yet: call t(**batch) with gradients on first."
            if state.settings.enabled
            else f"Checkpointing of {name} is switched off: call gradient_checkpointing_enable(), then t(**batch)."
        )
    return list(state.records)


def explain(transformed: nn.Module) -> Explanation:
    """What the captured graphs save for backward, why, and what they compute again.

    The result prints as tables; ``.to_dict()`` and ``.to_json()`` give all figures: bytes, and floating point
    operations, of which a multiply-add counts as two.

    Example::

        report = fxckpt.explain(t)
        print(report)
        print(report.saved_bytes, report.baseline_saved_bytes)

    For the figures without the rewrite, the first call for a graph runs PyTorch's partitioner on a copy of it.

    Args:
        transformed: what :func:`transform` returned, compiled or wrapped or not.

    Raises:
        CaptureError: nothing has been captured yet.
        FxckptError: not a transformed model.
    """
    records = graphs(transformed)
    state = state_of(transformed)
    return explain_records(records, state.settings, type(state.model).__name__, state.transfer_stats())


def to_networkx(record: GraphRecord | nn.Module) -> Any:
    """The graph of regions as a ``networkx.DiGraph``: what each computes and saves, and the tensors between them.

    Nodes are the names of the regions, ``"inputs"``, ``"outputs"``, and what is computed outside every region:
    ``"before"`` and ``"after NAME"``, where NAME is the last region it depends on. Node attributes: ``treatment``,
    ``inside``, ``nodes``, ``saved_bytes``, ``offloaded_bytes``, ``flops``, ``recomputed_flops``. Edge attributes:
    ``bytes``, and ``tensors``, a list of dicts with ``name``, ``type`` and ``bytes``.

    Args:
        record: one of ``fxckpt.graphs(t)``, or a transformed model of which one graph has been captured.

    Raises:
        CaptureError: of the model, nothing or more than one graph has been captured.
    """
    if isinstance(record, GraphRecord):
        return network.to_networkx(record)
    found = graphs(record)
    if len(found) > 1:
        raise CaptureError(
            f"{len(found)} graphs of {type(record).__name__} have been captured: choose one, such as "
            "fxckpt.to_networkx(fxckpt.graphs(t)[0])."
        )
    return network.to_networkx(found[0])
