"""Plan within a budget: capture the step under each treatment, let the solver choose, and capture what it chose."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fxckpt.capture.regions import BoundaryLayer
from fxckpt.config import Budget, Settings
from fxckpt.decide.budget import Chain, Link, cheapest, smallest
from fxckpt.decide.device import DeviceSpec
from fxckpt.decide.layers import boundary_layers
from fxckpt.decide.plan import Plan
from fxckpt.decide.policy import Given, Treatment
from fxckpt.errors import BudgetError, SettingsError
from fxckpt.predict.amount import budget_bytes
from fxckpt.predict.capture import Captures
from fxckpt.predict.chain import Order, find_order, read_chain
from fxckpt.predict.plan import Planned, Target, plan_step

SAVES: tuple[tuple[str, ...], ...] = (("attention", "matmul"), ("matmul",), ("attention",))
"""What a recomputed layer may save all the same, where the user names nothing. The second is in place of the first for
layers without a kernel for attention; beside it, it would recompute just that."""
NOMINAL = DeviceSpec(
    "nominal",
    "no device: 100 floating point operations take as long as a byte, which is what order matters for",
    {str(t).removeprefix("torch."): 1e14 for t in (torch.float32, torch.float64, torch.bfloat16, torch.float16)},
    bandwidth=1e12,
)
"""In place of a device that is not known. Its seconds compare treatments; nobody is told them."""
TRIES = 6
"""So often the solver is asked again, with what the capture of its last answer has shown."""
WORTH = 0.002
"""It is not asked for less than this share of the step's seconds: each answer is captured, which takes long."""
RESERVE = 1024
"""Bytes of a budget that are left for scalars that are in no graph, such as the loss and its gradient."""
WHOLE = 12
"""So many layers are all traced, once. Of more a few stand for all where treatments repeat, which takes two traces."""
_LITTLE = 1e-4
"""This share of a layer's seconds speaks for what costs the same otherwise: of equal layers those in front hold less,
and nothing is copied for nothing."""


@dataclass(frozen=True)
class _Option:
    """A treatment, and the step in which all layers get it."""

    treatment: Treatment
    planned: Planned

    @property
    def offloaded(self) -> dict[str, int]:
        """Bytes that each layer offloads."""
        return {one.name: one.offloaded_bytes for one in self.planned.plan.layers}


@dataclass(frozen=True)
class _Found:
    """A choice that was captured, and what it costs as the chain counts."""

    planned: Planned
    cost: float

    @property
    def peak(self) -> int:
        """The most bytes in memory at once."""
        return self.planned.plan.peak_bytes


class BudgetPlanner:
    """Plans of one step that keep budgets. What its layers need is captured once, for as many budgets as are asked.

    Args:
        captures: of the original model and a batch.
        settings: as ``transform`` makes them; with ``offload`` what leaves the device is chosen, too.
        target: what it is planned for. Where its device is not known, operations are weighed against bytes by what is
            usual, and ``predicted_seconds`` is None.

    Raises:
        CaptureError: the step cannot be captured, or not without knowing the contents of tensors.
    """

    def __init__(self, captures: Captures, settings: Settings, target: Target) -> None:
        self.captures, self.settings, self.target = captures, settings, target
        self.model = captures.model
        self.layers = _innermost(boundary_layers(self.model, settings.layers))
        self.known: dict[Given, Planned] = {}
        captured = list(self._capture_options())
        self.order: Order = find_order(captured[0].planned.steps, self.layers)
        kinds = {layer: _kind(self.model.get_submodule(layer)) for layer in self.layers}
        self.options = _useful(captured, target.compiled)
        chain = read_chain(self.order, [option.planned.steps for option in self.options], kinds)
        self.chain = Chain(tuple(self._priced(i, link) for i, link in enumerate(chain.links)))
        self.found: dict[tuple[int, ...], _Found] = {}
        for i, option in enumerate(self.options):
            self.found[self._alike(i)] = _Found(option.planned, self.chain.cost(self._alike(i)))
        self.whole = _Found(captured[0].planned, 0.0)
        self.worth = WORTH * sum(self.whole.planned.steps.seconds or ())

    def within(self, budget: Budget) -> Plan:
        """The plan of least predicted seconds whose peak is within `budget`; where everything fits, everything is kept.

        Raises:
            BudgetError: no choice is within it; the message names the smallest that would do.
        """
        limit = budget_bytes(budget, self.model, self.settings.optimizer_bytes)
        room = limit - RESERVE
        best = self.whole if self.whole.peak <= room else self._cheapest(room)
        if best.peak > room:
            raise BudgetError(_too_small(best.planned, limit, type(self.model).__name__))
        return dataclasses.replace(best.planned.plan, budget_bytes=limit)

    def _cheapest(self, room: int) -> _Found:
        """What costs the least of the captured choices within `room`; where none is, the one of the lowest peak."""
        guess = cheapest(self.chain, room)
        for _ in range(TRIES):
            chosen = None if guess is None else cheapest(self.chain, room - self._off(guess))
            fitting = [one.cost for one in self.found.values() if one.peak <= room]
            if chosen is None or self.chain.cost(chosen) > min(fitting, default=math.inf) - self.worth:
                break
            self._find(chosen)
            guess = chosen
        within = [one for one in self.found.values() if one.peak <= room]
        return min(within, key=lambda one: (one.cost, one.peak)) if within else self._lowest

    def _find(self, chosen: tuple[int, ...]) -> _Found:
        """Capture what was chosen."""
        if chosen not in self.found:
            self.found[chosen] = _Found(self._planned(chosen), self.chain.cost(chosen))
        return self.found[chosen]

    def _off(self, chosen: tuple[int, ...]) -> int:
        """By how many bytes a choice needs more than its chain says, by the captured one that is most like it."""
        likest = min(reversed(self.found), key=lambda other: sum(a != b for a, b in zip(chosen, other, strict=True)))
        return self.found[likest].peak - self.chain.peak(likest)

    def _alike(self, option: int) -> tuple[int, ...]:
        """The choice of one option for all layers."""
        choices = {link.decider: option if len(link.choices) > 1 else 0 for link in self.chain.links}
        return tuple(choices[decider] for decider in sorted(choices))

    def spread(self, count: int) -> list[Budget]:
        """So many budgets at equal distances, from the smallest that can be kept to what keeping everything needs."""
        low, high = (one.peak + RESERVE for one in (self._lowest, self.whole))
        steps = range(count) if low < high else range(1)
        return [Budget(low + (high - low) * i // max(count - 1, 1)) for i in steps]

    def _capture_options(self) -> Iterator[_Option]:
        has_attention = False
        for treatment in _treatments(self.settings):
            if treatment.save == SAVES[1] and has_attention and not self.settings.save:
                continue
            try:
                found = self._plan({layer: treatment for layer in self.layers})
            except SettingsError:
                if treatment.save and not self.settings.save:  # no layer computes what we thought of
                    continue
                raise
            has_attention = has_attention or treatment.save == SAVES[0]
            yield _Option(treatment, found)

    def _plan(self, treatments: Mapping[str, Treatment], checked: bool = False) -> Planned:
        given = Given(tuple(treatments.items()), checked)
        if given not in self.known:
            settings = dataclasses.replace(self.settings, budget=None, policy=given, save=())
            fold = self.target.compiled or len(self.layers) > WHOLE
            self.known[given] = plan_step(self.captures, settings, self.target, nominal=NOMINAL, fold=fold)
        return self.known[given]

    def _planned(self, chosen: Sequence[int]) -> Planned:
        """The plan of these choices."""
        by_layer: dict[str, Treatment] = {}
        for link, group in zip(self.chain.links[1:-1], self.order.groups, strict=True):
            by_layer |= dict.fromkeys(group, self.options[chosen[link.decider]].treatment)
        return self._plan(by_layer, checked=True)

    @functools.cached_property
    def _lowest(self) -> _Found:
        """The plan of the lowest peak: of the one that the solver thinks of, and of all layers treated alike."""
        self._find(smallest(self.chain))
        all_layers = [layer.name for layer in boundary_layers(self.model, self.settings.layers)]
        found = list(self.found.values())
        for offload in (False, True) if self.settings.offload is not None else (False,):
            planned = self._plan(dict.fromkeys(all_layers, Treatment(save=(), offload=offload)))
            found.append(_Found(planned, math.inf))
        return min(found, key=lambda one: one.peak)

    def _priced(self, place: int, link: Link) -> Link:
        """The link with what copies add to its cost, and with the little that settles ties."""
        if len(link.choices) == 1:
            return link
        group = self.order.groups[place - 1]
        base, most = link.choices[0].cost, max(choice.held for choice in link.choices)
        late = _LITTLE * base * place / len(self.order.groups)
        choices = []
        for option, choice in zip(self.options, link.choices, strict=True):
            copies = self._copy_seconds(sum(option.offloaded.get(layer, 0) for layer in group))
            extra = choice.cost - base + max(0.0, copies - choice.cost / 3) + _LITTLE * copies
            choices.append(dataclasses.replace(choice, cost=extra + late * (1 - choice.held / max(most, 1))))
        return Link(link.name, link.decider, tuple(choices))

    def _copy_seconds(self, nbytes: int) -> float:
        """Seconds of a copy there, or back, whichever takes longer; by the device's memory where nothing is known."""
        device = self.target.device or NOMINAL
        rates = [device.to_host, device.from_host]
        place = self.settings.offload
        disk = device.disk(place.folder) if place is not None and place.to == "disk" else None
        rates += [] if disk is None else [disk.write, disk.read]
        known = [rate for rate in rates if rate is not None] or [device.bandwidth or 1e12]
        return nbytes / min(known)


def _useful(options: list[_Option], compiled: bool) -> list[_Option]:
    """The options to choose from, layer by layer.

    A layer that saves its products and recomputes the rest needs less memory than a kept one, and about the same time
    where a compiler fuses that rest. So there it stands for the kept one.
    """
    saving = [option for option in options if option.treatment.recompute]
    return saving if compiled and any("matmul" in (one.treatment.save or ()) for one in saving) else options


def _kind(layer: nn.Module) -> Hashable:
    """Equal for layers that compute alike, as far as their classes and parameters tell."""
    return type(layer), tuple((name, p.shape) for name, p in layer.named_parameters())


def _treatments(settings: Settings) -> list[Treatment]:
    """The treatments to choose from; the first one keeps everything on the device."""
    saves = [settings.save] if settings.save else list(SAVES)
    found = [Treatment(False, (), False), *(Treatment(True, save, False) for save in (*saves, ()))]
    if settings.offload is not None:
        found += [dataclasses.replace(one, offload=True) for one in found]
    return found


def _innermost(layers: Sequence[BoundaryLayer]) -> list[str]:
    """Layers without others inside: what is around them is kept, so that they are decided one by one."""
    names = [layer.name for layer in layers]
    return [n for n in names if not any(o != n and (not n or o.startswith(n + ".")) for o in names)]


def _too_small(best: Planned, limit: int, model: str) -> str:
    steps, least = best.steps, best.plan.peak_bytes + RESERVE
    at = steps.levels.index(max(steps.levels))
    where = steps.modules[at] or "code outside of modules"
    way = "backward" if at >= steps.backward else "forward"
    return (
        f"fxckpt: no choice of what to recompute keeps a step of {model} within {limit:,} bytes. The smallest that "
        f"was found is {least:,} bytes, on top of parameters, in the {way} of {where}. Give that, a smaller batch, "
        "shorter sequences, or offload=, where there is none."
    )
