"""Folding for print: one name for many equal things, such as ``model.layers.{0,2,4}``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

MOST_NUMBERS = 6
"""Longer lists of numbers that follow no rule are shortened in their middle."""

_NUMBER = re.compile(r"(\d+)")


def stem(name: str) -> str:
    """`name` with ``*`` in place of each number: names of one stem may fold."""
    return _NUMBER.sub("*", name)


def fold_names(names: Iterable[str]) -> str:
    """One text for several names: ``a.{0,2}.b``, ``a.{0-3}``, ``a.{0,2,...,30}``.

    Names fold where they differ in one number; where they differ in several, the last of these folds. Names that do not
    fold stand side by side.
    """
    groups: dict[tuple[str, ...], list[list[str]]] = {}
    for parts in (_NUMBER.split(name) for name in dict.fromkeys(names)):
        groups.setdefault(tuple(parts[::2]), []).append(parts[1::2])
    texts = []
    for words, rows in groups.items():
        varying = [i for i in range(len(words) - 1) if len({row[i] for row in rows}) > 1]
        last = varying[-1] if varying else 0
        kept: dict[tuple[str, ...], list[int]] = {}
        for row in rows:
            kept.setdefault((*row[:last], *row[last + 1 :]), []).extend(int(n) for n in row[last : last + 1])
        for others, numbers in kept.items():
            shown = [*others[:last], _numbers(numbers), *others[last:]] if numbers else []
            texts.append("".join(w + n for w, n in zip(words, [*shown, ""], strict=True)))
    return ", ".join(texts)


def _numbers(numbers: Sequence[int]) -> str:
    steps = {b - a for a, b in pairwise(numbers)}
    if len(numbers) == 1:
        return str(numbers[0])
    if steps == {1} and len(numbers) > 2:
        return f"{{{numbers[0]}-{numbers[-1]}}}"
    if len(steps) == 1 and len(numbers) > 5:
        return f"{{{numbers[0]},{numbers[1]},...,{numbers[-1]}}}"
    texts = list(map(str, numbers))
    if len(texts) > MOST_NUMBERS:  # how many they are stands beside their names
        texts = [*texts[: MOST_NUMBERS - 3], "...", *texts[-2:]]
    return "{" + ",".join(texts) + "}"
