"""Keep a budget: of several treatments for each layer, those that fit in memory at the least cost.

A training step is a *chain*: its links run one after the other in the forward, and in reverse order in the backward. A
link holds bytes from its forward to its backward; while it runs, it needs some on top of what the links before it hold.
The step's peak is the highest of these sums. With one 0/1 variable for each choice of each layer, the sums are linear,
and the cheapest choices below a limit are the solution of an integer program, which HiGHS solves
(``scipy.optimize.milp``). The formulation for whole networks is that of Checkmate (Jain et al., MLSys 2020); over a
chain it has two constraints for each link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

SOLVER_SECONDS = 30.0
"""HiGHS is stopped after this; what it has then fits, and may not be the cheapest."""


@dataclass(frozen=True)
class Choice:
    """What one choice for a link needs.

    Attributes:
        held: bytes that it holds from its forward to its backward.
        forward: the most bytes while its forward runs, on top of what the links before it hold.
        backward: the most bytes while its backward runs, on top of what the links before it hold; its own `held` and
            what later links leave (gradients of parameters) are among them.
        cost: seconds, or another measure, that the step takes longer by.
    """

    held: int
    forward: int
    backward: int
    cost: float = 0.0


@dataclass(frozen=True)
class Link:
    """A stretch of the step.

    Attributes:
        name: for messages.
        decider: the number of the decision that it hangs on; links of one decision get the same choice.
        choices: for each choice of that decision what it needs.
    """

    name: str
    decider: int
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Chain:
    """A training step, link by link in the order of its forward."""

    links: tuple[Link, ...]

    def peaks(self, chosen: Sequence[int]) -> list[tuple[int, int]]:
        """For each link the most bytes in its forward, and in its backward.

        Args:
            chosen: the choice for each decision.
        """
        held, found = 0, []
        for link in self.links:
            choice = link.choices[chosen[link.decider]]
            found.append((held + choice.forward, held + choice.backward))
            held += choice.held
        return found

    def peak(self, chosen: Sequence[int]) -> int:
        """The most bytes at once."""
        return max((max(pair) for pair in self.peaks(chosen)), default=0)

    def cost(self, chosen: Sequence[int]) -> float:
        """What the choices cost together."""
        return sum(link.choices[chosen[link.decider]].cost for link in self.links)


def cheapest(chain: Chain, limit: int) -> tuple[int, ...] | None:
    """The choices of the least cost whose peak is at most `limit` bytes, or None where none fit.

    Of several that cost the same, those of the lowest peak.
    """
    program = _Program(chain)
    bound = limit
    while True:
        chosen = program.solve(program.costs / program.unit, bound)
        if chosen is None:
            return None
        over = chain.peak(chosen) - limit
        if over <= 0:
            break
        bound -= over  # HiGHS keeps constraints to a millionth of them
    least = chain.cost(chosen)
    lower = program.lowest(least)
    fits = lower is not None and chain.peak(lower) <= chain.peak(chosen)
    return lower if fits and chain.cost(lower) <= least else chosen  # type: ignore[arg-type]


def smallest(chain: Chain) -> tuple[int, ...]:
    """The choices of the lowest peak; of equal ones the cheapest."""
    program = _Program(chain)
    lowest = program.lowest(None)
    assert lowest is not None  # without a limit anything fits
    return cheapest(chain, chain.peak(lowest)) or lowest


_COSTS = 1e5
"""What costs are scaled to, in sum: HiGHS takes differences below a millionth for none."""


class _Program:
    """The integer program of a chain: a column for each choice of each decision, and the last one for the peak."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        counts: dict[int, int] = {link.decider: len(link.choices) for link in chain.links}
        self.deciders = sorted(counts)
        self.first: dict[int, int] = {}
        columns = 0
        for decider in self.deciders:
            self.first[decider] = columns
            columns += counts[decider]
        self.counts, self.columns = counts, columns
        self.costs = np.zeros(columns + 1)
        self.scale = float(max(1, max(max(c.held, c.forward, c.backward) for n in chain.links for c in n.choices)))
        self.rows = self._rows()
        self.unit = float(np.abs(self.costs).sum() or 1.0) / _COSTS

    def _rows(self) -> csr_array:
        """For each link the bytes of its forward and of its backward, as far as each choice adds to them."""
        held = np.zeros(self.columns + 1)
        rows = []
        for link in self.chain.links:
            start = self.first[link.decider]
            part = slice(start, start + len(link.choices))
            for needs in ([c.forward for c in link.choices], [c.backward for c in link.choices]):
                row = held.copy()
                row[part] += needs
                rows.append(row)
            held[part] += [c.held for c in link.choices]
            self.costs[part] += [c.cost for c in link.choices]
        return csr_array(np.array(rows) / self.scale)

    def solve(self, objective: np.ndarray, limit: int | None, most: float | None = None) -> tuple[int, ...] | None:
        """The choices with the least `objective` that need at most `limit` bytes and cost at most `most`."""
        peak = self.rows.copy().tolil()
        peak[:, -1] = -1.0
        one = np.zeros((len(self.deciders), self.columns + 1))
        for i, decider in enumerate(self.deciders):
            one[i, self.first[decider] : self.first[decider] + self.counts[decider]] = 1.0
        constraints = [LinearConstraint(peak.tocsr(), -np.inf, 0.0), LinearConstraint(csr_array(one), 1.0, 1.0)]
        if most is not None:
            costs = LinearConstraint(csr_array(self.costs[None] / self.unit), -np.inf, most / self.unit)
            constraints.append(costs)
        upper = np.ones(self.columns + 1)
        upper[-1] = np.inf if limit is None else limit / self.scale
        if upper[-1] < 0:
            return None
        result = milp(
            objective,
            integrality=np.append(np.ones(self.columns), 0.0),
            bounds=Bounds(0.0, upper),
            constraints=constraints,
            options={"time_limit": SOLVER_SECONDS, "mip_rel_gap": 0.0},
        )
        if result.x is None:
            return None
        chosen = [0] * (max(self.deciders, default=-1) + 1)
        for decider in self.deciders:
            start = self.first[decider]
            chosen[decider] = int(np.argmax(result.x[start : start + self.counts[decider]]))
        return tuple(chosen)

    def lowest(self, most: float | None) -> tuple[int, ...] | None:
        """The choices of the lowest peak that cost at most `most`."""
        objective = np.zeros(self.columns + 1)
        objective[-1] = 1.0
        return self.solve(objective, None, most)
