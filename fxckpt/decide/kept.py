"""Values of kept regions that are to be offloaded: which the partitioner saves of them, is known after it alone."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from torch import fx

from fxckpt import graph as G
from fxckpt.capture.regions import Region
from fxckpt.decide.policy import Treatment
from fxckpt.decide.transfer_names import TransferNames


def kept_to_move(
    regions: Sequence[Region],
    treatments: Mapping[str, Treatment],
    owner: Mapping[fx.Node, Region],
    given: Container[fx.Node] = (),
) -> dict[fx.Node, Region]:
    """For each node of a kept region that is to be offloaded, and each of `given` that it reads, the innermost such."""
    found: dict[fx.Node, Region] = {}
    seen = set(owner)
    for region in reversed(regions):  # a nested one comes behind the one around it, and its own treatment holds
        treatment = treatments.get(region.layer.name, Treatment.KEEP)
        if not treatment.recompute:
            own = [node for node in region.nodes if treatment.offload and node not in seen]
            found |= {read: region for node in own for read in node.all_input_nodes if read in given}
            found |= {node: region for node in own}
            seen.update(region.nodes)
    return found


def tag_kept(kept: Mapping[fx.Node, Region], parametric: set[fx.Node], names: TransferNames) -> None:
    """Tag the values of kept regions that are to be offloaded if the partitioner saves them."""
    for node, region in kept.items():
        if node in parametric and G.tensor(node) is not None and G.tag(node) is None:
            G.set_tag(node, G.Tag(G.Kind.KEPT, (region.index,), names.of(region, node.name), True))
