"""Names of transfers: ``layers_3_input`` for what ``model.layers.3`` starts from, ``layers_3_mm`` for its ``mm``."""

from __future__ import annotations

from collections.abc import Iterable

from fxckpt.capture.regions import Region


class TransferNames:
    """The names of one graph's transfers: those of its layers without the parts that all have in front."""

    def __init__(self, regions: Iterable[Region]) -> None:
        self._shared = _common_prefix({r.layer.name for r in regions})

    def of(self, region: Region, value: str) -> str:
        """For a value of `region`; ``layers_3_call1_...`` for the layer's second call."""
        parts = region.layer.name.split(".")[self._shared :]
        call = f"_call{region.call}" if region.call else ""
        return "_".join(parts).replace("-", "_") + call + f"_{value}"


def _common_prefix(names: set[str]) -> int:
    """How many leading parts all names share, short of the last two."""
    parts = [n.split(".") for n in names]
    shared = 0
    while all(len(p) > shared + 2 for p in parts) and len({p[shared] for p in parts}) == 1:
        shared += 1
    return shared
