"""The ways to run one training step that a benchmark compares, and the small language that names them.

    NAME           eager, compile
    NAME@n         every n-th layer is checkpointed, or a fraction of the memory
    NAME@24GiB     what is recomputed is chosen so that the peak stays within so many bytes
    NAME@FILE.json a plan is followed
    NAME@n+offload the activations that checkpointed layers start from go to host memory
    NAME@n+disk    they go to a disk, to a file in the folder for temporary files

Another way is one more line in ``KINDS``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

import fxckpt
from fxckpt.config import parse_budget
from fxckpt.errors import SettingsError
from fxckpt.models.spec import ModelSpec
from fxckpt.torch_private import set_activation_memory_budget

PLAN = ".json"
"""How the name of a plan's file ends."""
Run = Callable[..., Any]
"""``run(**batch)`` is the forward."""


@dataclass(frozen=True)
class Variant:
    """One parsed variant, such as ``fxckpt@2+offload``."""

    kind: str
    """The name before ``@``, a key of ``KINDS``."""
    number: float = 1
    """What stands after ``@``: every n-th layer, or a fraction."""
    option: str = ""
    """What stands after ``+``: ``"offload"``, ``"disk"``, or nothing."""
    given: str = ""
    """What stands after ``@`` in place of a number: a budget, or a plan's file."""

    def __str__(self) -> str:
        takes = KINDS[self.kind].takes
        number = {"": "", "n": f"@{int(self.number)}", "f": f"@{self.number:g}"}[takes]
        chosen = f"@{self.given}" if self.given else number
        return f"{self.kind}{chosen}{f'+{self.option}' if self.option else ''}"

    @property
    def offload(self) -> bool | str:
        """What ``offload=`` is to be."""
        return "disk" if self.option == "disk" else bool(self.option)

    @property
    def ours(self) -> bool:
        """Whether fxckpt rewrites the step."""
        return KINDS[self.kind].ours

    @property
    def compiled(self) -> bool:
        """Whether the first step captures graphs."""
        return KINDS[self.kind].compiled


@dataclass(frozen=True)
class Kind:
    """How the variants of one name are made."""

    make: Callable[[nn.Module, Variant, ModelSpec], Run]
    """From the model to what is called with the batch."""
    takes: Literal["", "n", "f"] = ""
    """What stands after ``@``: nothing, every n-th layer, or a fraction of 1."""
    options: tuple[str, ...] = ()
    """What may stand after ``+``."""
    compiled: bool = True
    """Whether it captures graphs."""

    @property
    def ours(self) -> bool:
        """Whether fxckpt rewrites the step."""
        return self.make in (_fxckpt, _fxckpt_compiled)


def _eager(model: nn.Module, variant: Variant, spec: ModelSpec) -> Run:
    return model


def _hf(model: nn.Module, variant: Variant, spec: ModelSpec) -> Run:
    new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
    enable = getattr(model, new, None) or getattr(model, old, None)
    if enable is None:
        raise SettingsError(f"{type(model).__name__} is no transformers model: it has no {new}().")
    enable(every_n_layers=int(variant.number), offload=variant.offload)
    return model


def _budget(model: nn.Module, variant: Variant, spec: ModelSpec) -> Run:
    set_activation_memory_budget(variant.number)
    return _compiled(model, variant, spec)


def _compiled(model: nn.Module, variant: Variant, spec: ModelSpec) -> Run:
    run: Run = torch.compile(model)
    return run


def _hf_compiled(model: nn.Module, variant: Variant, spec: ModelSpec) -> Run:
    _hf(model, variant, spec)
    return _compiled(model, variant, spec)


def _fxckpt(model: nn.Module, variant: Variant, spec: ModelSpec) -> Run:
    layers = list(spec.layers) or None
    if variant.given.endswith(PLAN):
        return fxckpt.transform(model, plan=variant.given)
    if variant.given:
        return fxckpt.transform(model, budget=variant.given, offload=variant.offload, layers=layers)
    return fxckpt.transform(model, every_n=int(variant.number), offload=variant.offload, layers=layers)


def _fxckpt_compiled(model: nn.Module, variant: Variant, spec: ModelSpec) -> Run:
    run: Run = torch.compile(_fxckpt(model, variant, spec))
    return run


KINDS: dict[str, Kind] = {
    "eager": Kind(_eager, compiled=False),
    "hf-eager": Kind(_hf, "n", ("offload",), compiled=False),
    "compile": Kind(_compiled),
    "hf-compile": Kind(_hf_compiled, "n", ("offload",)),
    "torch-budget": Kind(_budget, "f"),
    "fxckpt-plain": Kind(_fxckpt, "n", ("offload", "disk")),
    "fxckpt": Kind(_fxckpt_compiled, "n", ("offload", "disk")),
}


def known_variants() -> str:
    """All forms, in one line."""
    forms = (f"{name}{'@' if k.takes else ''}{k.takes}{_options(k, '[+{}]')}" for name, k in KINDS.items())
    return (
        f"{', '.join(forms)} (n: every n-th layer, for fxckpt also a budget such as 24GiB, or a plan's FILE.json; "
        "f: fraction of the memory)"
    )


def _options(kind: Kind, form: str) -> str:
    return form.format("|+".join(kind.options)) if kind.options else ""


def parse_variant(text: str) -> Variant:
    """One variant from its text.

    Raises:
        SettingsError: there is no such variant; the message lists what exists.
    """
    found = re.fullmatch(r"([\w-]+)(?:@([^+@]*))?(?:\+(.*))?", text.strip())
    kind = KINDS.get(found[1]) if found else None
    if found is None or kind is None:
        raise SettingsError(f"There is no variant {text.strip()!r}. There are: {known_variants()}.")
    name, number, option = found.groups()
    if option is not None and option not in kind.options:
        allowed = f"only {name}@{kind.takes}{_options(kind, '+{}')}" if kind.options else "nothing after +"
        raise SettingsError(f"Variant {text.strip()!r}: {name} takes {allowed}.")
    if not kind.takes and number is not None:
        raise SettingsError(f"Variant {text.strip()!r}: {name} takes no number; write {name}.")
    if kind.ours and number and not number.isdecimal():
        return Variant(name, option=option or "", given=_given(text.strip(), number, option))
    return Variant(name, _number(text.strip(), name, number, kind.takes) if kind.takes else 1, option or "")


def _given(text: str, given: str, option: str | None) -> str:
    if given.endswith(PLAN):
        if option:
            raise SettingsError(f"Variant {text!r}: a plan says itself what is offloaded.")
        return given
    try:
        parse_budget(given if not given[-1].isdigit() else "")
    except SettingsError as error:
        raise SettingsError(
            f"Variant {text!r}: after @ goes a whole number of at least 1, a budget such as 24GiB, or a plan's file."
        ) from error
    return given


def _number(text: str, name: str, number: str | None, takes: str) -> float:
    if takes == "n":
        if number is None or not number.isdecimal() or int(number) < 1:
            raise SettingsError(f"Variant {text!r}: write {name}@n, n a whole number of at least 1, such as {name}@2.")
        return int(number)
    try:
        value = float(number or "")
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise SettingsError(f"Variant {text!r}: write {name}@f, f a fraction between 0 and 1, such as {name}@0.5.")
    return value


def parse_variants(texts: Iterable[str]) -> list[Variant]:
    """Variants from texts, each once.

    Raises:
        SettingsError: none is given, one does not exist, or one stands twice.
    """
    found = [parse_variant(text) for text in texts if text.strip()]
    if not found:
        raise SettingsError(f"No variant is given. There are: {known_variants()}.")
    twice = sorted({str(v) for v in found if found.count(v) > 1})
    if twice:
        raise SettingsError(f"Each variant can be given once; given twice: {', '.join(twice)}.")
    return found
