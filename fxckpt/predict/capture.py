"""Capture a training step without running it: its rewritten graphs, from fake tensors."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fxckpt import torch_private
from fxckpt.config import Settings
from fxckpt.errors import CaptureError, FxckptError
from fxckpt.pipeline import rewrite
from fxckpt.predict.fake import fake_batch, fake_model
from fxckpt.predict.fold import Fold, shorten
from fxckpt.record import GraphRecord
from fxckpt.torch_private import Schedule
from fxckpt.use.check import check_captured, check_saves
from fxckpt.use.state import Joint, State
from fxckpt.use.view import make_view, state_of


@dataclass(frozen=True)
class CapturedStep:
    """The graphs of one training step.

    Attributes:
        records: one for each graph, in order of capture.
        schedules: what Inductor makes of the graphs; None for a step that runs node by node.
    """

    records: Sequence[GraphRecord]
    schedules: Sequence[Schedule] | None = None


class Captures:
    """Captures of one training step under any settings.

    What becomes of the layers changes what is made of a joint graph, and not how it is traced. So a step that runs node
    by node is traced once, and rewritten for each of the settings; unless Dynamo has captured frames of a module that
    there are several of, which share a graph where they are treated alike.

    Args:
        model: the original model, in the mode (training or not) that it is to run in. It is not run, nor changed.
        batch: keyword arguments of a call. Only shapes, types and strides of its tensors matter.
    """

    def __init__(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        self.model, self.batch = model, batch
        self._traced: dict[Any, tuple[nn.Module, list[Joint]]] = {}

    def step(self, settings: Settings, folds: Sequence[Fold] = (), *, compiled: bool = False) -> CapturedStep:
        """The graphs of one training step of ``transform(model, ...)``.

        Args:
            settings: as ``transform`` makes them.
            folds: layers to be left out.
            compiled: whether Inductor is to compile the graphs, which makes others. It lowers and schedules them, and
                generates no code.

        Raises:
            CaptureError: the step cannot be captured, or not without knowing the contents of tensors.
        """
        key = tuple(folds), settings.layers
        if not compiled and key in self._traced:
            return _rewritten(*self._traced[key], settings)
        with torch_private.fake_tensors():
            model = fake_model(self.model)
            shorten(model, folds)
        state, schedules = _run(model, self.batch, settings, compiled)
        joints, state.joints = state.joints, None
        if joints is not None and len(joints) == len(state.records) and _of_single_modules(model, joints):
            self._traced[key] = model, joints
        return CapturedStep(list(state.records), schedules)


def capture_step(
    model: nn.Module, batch: Mapping[str, Any], settings: Settings, *, compiled: bool = False
) -> CapturedStep:
    """The graphs of one training step; see :class:`Captures`."""
    return Captures(model, batch).step(settings, compiled=compiled)


def _of_single_modules(model: nn.Module, joints: Sequence[Joint]) -> bool:
    kinds = Counter(type(module) for module in model.modules())
    return all(joint.compilation.root is None or kinds[type(joint.compilation.root)] == 1 for joint in joints)


def _rewritten(model: nn.Module, joints: Sequence[Joint], settings: Settings) -> CapturedStep:
    """The step of a model that was traced before, under other settings."""
    state = state_of(make_view(model, settings))

    def run(joint: Joint) -> None:
        request = state.request(joint.capture, joint.compilation.root, joint.compilation.frame)
        state.captures += 1
        graph, options = torch_private.snapshot(joint.graph), dict(joint.options)
        state.add(rewrite(joint.partition, graph, joint.inputs, options, request, joint.graph)[2])

    for joint in joints:
        joint.context.again(partial(run, joint))
    check_captured(state)
    check_saves(state)
    return CapturedStep(list(state.records))


def _run(
    model: nn.Module, batch: Mapping[str, Any], settings: Settings, compiled: bool
) -> tuple[State, Sequence[Schedule] | None]:
    """Call a model on fake tensors; its state afterwards, and what Inductor makes of its graphs."""
    name = type(model).__name__
    scheduling = torch_private.schedules_alone() if compiled else contextlib.nullcontext()
    with torch_private.fake_tensors(), torch.enable_grad(), scheduling as schedules:
        view = make_view(model, settings)
        state = state_of(view)
        state.joints = None if compiled else []
        run: Any = torch.compile(view) if compiled else view
        try:
            run(**fake_batch(batch))
        except FxckptError:
            raise
        except torch_private.NEEDS_DATA as error:
            raise CaptureError(
                f"fxckpt: {name} asks for the contents of a tensor ({error}), and a plan is made "
                "without any. Train a step of fxckpt.transform(model) and ask fxckpt.explain of that."
            ) from error
        except torch_private.CANNOT_LOWER as error:
            raise CaptureError(
                f"fxckpt: Inductor cannot compile a graph of {name} on tensors without contents ({error}). Plan with "
                "compiled=False, which tells the bytes saved and offloaded all the same."
            ) from error
    state.resolve_pending()
    if not state.records:
        raise CaptureError(f"fxckpt: no graph of {name} was captured from this batch.")
    return state, schedules
