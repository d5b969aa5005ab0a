"""`python -m tests.zoo --list` and `python -m tests.zoo --try [NAMES]`: look at the zoo, try entries in eager."""

from __future__ import annotations

import argparse
import sys
import time
import traceback

import torch

from tests.zoo import REGISTRY, Entry, get_loss
from tests.zoo.registry import SEED


def attempt(entry: Entry, dropout: bool) -> str:
    """One line about a forward and backward of an entry."""
    start = time.perf_counter()
    model, batch = entry.build(dropout)
    torch.manual_seed(SEED)
    loss = get_loss(model(**batch))
    loss.backward()
    given = [p.grad for p in model.parameters() if p.grad is not None]
    finite = bool(torch.isfinite(loss)) and all(bool(torch.isfinite(g).all()) for g in given)
    size = sum(p.numel() for p in model.parameters()) / 1e3
    return (
        f"loss {loss.item():9.4f}  {size:7.0f}k  grads {len(given)}/{len(list(model.parameters()))}"
        f"  {time.perf_counter() - start:.1f}s{'' if finite else '  NOT FINITE'}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print families and names")
    parser.add_argument("--try", dest="names", nargs="*", help="names or families; nothing means all")
    parser.add_argument("--dropout", action="store_true")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    failed = 0
    for entry in REGISTRY.values():
        if args.list:
            print(f"{entry.family:12s} {entry.name}")
        elif not args.names or {entry.name, entry.family} & set(args.names):
            try:
                line = attempt(entry, args.dropout)
            except Exception:
                failed += 1
                line = traceback.format_exc(limit=-1)
            print(f"{entry.family:12s} {entry.name:28s} {line}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
