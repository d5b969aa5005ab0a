"""The plan of a training step: what becomes of each layer, and what that will cost. Frozen, and kept as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxckpt.capture.regions import BoundaryLayer
from fxckpt.config import VERSION, Offload
from fxckpt.decide.policy import Given, Treatment
from fxckpt.errors import SettingsError

FORMAT = 2
"""Of plan files; a file of another one is refused."""


@dataclass(frozen=True)
class LayerPlan:
    """What becomes of one boundary layer.

    Attributes:
        name: its qualified name.
        treatment: ``"keep"`` or ``"recompute"``.
        save: what is saved of it all the same, where it is recomputed.
        offload: whether what its calls hold for backward leaves the device.
        saved_bytes: bytes that its calls hold on the device for backward.
        offloaded_bytes: bytes that they hold where they were offloaded to.
        recomputed_flops: floating point operations that the backward does again for it.
    """

    name: str
    treatment: str
    save: tuple[str, ...]
    offload: bool
    saved_bytes: int
    offloaded_bytes: int
    recomputed_flops: int

    @property
    def decided(self) -> Treatment:
        """The treatment that this is."""
        return Treatment(self.treatment == Treatment.RECOMPUTE.kind, self.save, self.offload)


@dataclass(frozen=True)
class Plan:
    """What becomes of a model's layers in a training step, and what the step will cost.

    ``fxckpt.plan`` makes one, ``fxckpt.transform(model, plan=plan)`` follows it, in this process or, saved as a file,
    in another one. Bytes and FLOPs are counted as :class:`fxckpt.Explanation` counts them.

    Attributes:
        model: class name of the model.
        compiled: whether it is planned for ``torch.compile``, which makes other graphs than ``t(**batch)`` runs.
        offload: where boundary activations go, or None.
        layers: what becomes of each boundary layer, in the order of ``model.modules()``.
        batch: the planned batch: for each tensor its type and sizes, such as ``"int64[2, 16]"``.
        parameter_bytes: bytes of parameters and buffers.
        saved_bytes: bytes held on the device for backward.
        offloaded_bytes: bytes held for backward where they were offloaded to.
        flops: floating point operations of forward and backward without any recompute.
        recomputed_flops: those that recomputing adds.
        peak_bytes: the most bytes in memory at once during the step, gradients included, on top of parameters, batch
            and whatever else is there before it.
        predicted_seconds: seconds of forward and backward on the device that it is planned for; None where it is not
            known how fast that is.
        budget_bytes: what `peak_bytes` had to stay within, or None.
        optimizer_bytes: bytes that the optimizer keeps beside the parameters, or None where none was named.
    """

    model: str
    compiled: bool
    offload: Offload | None
    layers: tuple[LayerPlan, ...]
    batch: Mapping[str, str]
    parameter_bytes: int
    saved_bytes: int
    offloaded_bytes: int
    flops: int
    recomputed_flops: int
    peak_bytes: int
    predicted_seconds: float | None = None
    budget_bytes: int | None = None
    optimizer_bytes: int | None = None

    @property
    def policy(self) -> Given:
        """The policy that does what the plan says."""
        return Given(tuple((layer.name, layer.decided) for layer in self.layers), checked=True)

    def to_dict(self) -> dict[str, Any]:
        """Everything as dicts, lists, strings and numbers, for JSON."""
        return {"fxckpt_plan": FORMAT, "fxckpt": VERSION, **dataclasses.asdict(self)}

    def to_json(self, indent: int | None = 2) -> str:
        """:meth:`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, which :meth:`load` reads.

        Raises:
            SettingsError: the file cannot be written.
        """
        try:
            Path(path).write_text(self.to_json() + "\n", encoding="utf-8")
        except OSError as error:
            raise SettingsError(f"{path}: the plan cannot be written ({error.strerror}).") from error

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a file.

        Raises:
            SettingsError: the file cannot be read, or is no plan.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except OSError as error:
            raise SettingsError(f"{path}: the plan cannot be read ({error.strerror}).") from error
        except ValueError as error:  # SettingsError is one, too
            raise SettingsError(f"{path} is no plan of fxckpt: {error}") from error

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Plan:
        """The inverse of :meth:`to_dict`.

        Raises:
            SettingsError: `given` is no plan, or one of another version's form.
        """
        if not isinstance(given, Mapping) or given.get("fxckpt_plan") != FORMAT:
            raise SettingsError(f'it has no "fxckpt_plan": {FORMAT}. Make it anew with fxckpt.plan(...).save(path).')
        wanted = {field.name for field in dataclasses.fields(cls)}
        values = {name: value for name, value in given.items() if name in wanted}
        try:
            values["offload"] = None if values["offload"] is None else Offload(**values["offload"])
            values["layers"] = tuple(LayerPlan(**{**it, "save": tuple(it["save"])}) for it in values["layers"])
            made = cls(**values)
        except (KeyError, TypeError) as error:
            raise SettingsError(f"a field of it is missing or unknown ({error}).") from error
        made._check()
        return made

    def _check(self) -> None:
        numbers = ("parameter_bytes", "saved_bytes", "offloaded_bytes", "flops", "recomputed_flops", "peak_bytes")
        optional = ("budget_bytes", "optimizer_bytes")
        for name in (*numbers, *(name for name in optional if getattr(self, name) is not None)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise SettingsError(f"{name} is {value!r}, and must be a whole number of at least 0.")
        seconds = self.predicted_seconds
        if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds <= 0):
            raise SettingsError(f"predicted_seconds is {seconds!r}, and must be a number above 0, or null.")
        names = [layer.name for layer in self.layers]
        if len(set(names)) != len(names) or not all(isinstance(name, str) for name in names):
            raise SettingsError("its layers have names that are no texts, or twice the same.")
        known = [Treatment.KEEP.kind, Treatment.RECOMPUTE.kind]
        for layer in self.layers:
            if layer.treatment not in known:
                raise SettingsError(f"layer {layer.name} is to {layer.treatment!r}, which is none of {known}.")
            if layer.offload not in (False, self.offload is not None):
                raise SettingsError(f"layer {layer.name} has offload {layer.offload!r}; the plan says {self.offload}.")
            _ = layer.decided  # looks at what it saves

    def check_layers(self, model: str, layers: Iterable[BoundaryLayer]) -> None:
        """Refuse a model that the plan was not made for.

        Raises:
            SettingsError: its boundary layers are others.
        """
        here, planned = [layer.name for layer in layers], [layer.name for layer in self.layers]
        if here != planned:
            odd = sorted(set(here) ^ set(planned))[:5] or "the same ones in another order"
            raise SettingsError(
                f"The plan was made for a {self.model} of {len(planned)} boundary layers; this {model} has {len(here)} "
                f"(not in both: {odd}). Make a plan for this model, with the same layers=."
            )
