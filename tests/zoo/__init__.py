"""Tiny training models of many architectures, randomly initialised, behind one registry.

    from tests.zoo import REGISTRY, build, get_loss

    model, batch = build("llama", dropout=False)
    get_loss(model(**batch)).backward()

Nothing is downloaded: every transformers model is built from a configuration whose size fields were shrunk.
`python -m tests.zoo --list` prints the names, `python -m tests.zoo --try llama t5` builds and differentiates some.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from tests.zoo.registry import REGISTRY, Entry, build, get_loss

# Importing a family registers its entries; the order here is the order of REGISTRY.
from tests.zoo import (  # noqa: F401  isort: skip
    decoders,
    moe,
    state_space,
    encoders,
    encoder_decoders,
    vision,
    audio,
    multimodal,
    plain,
)
from tests.zoo.spread import CI_SPREAD

__all__ = ["CI_SPREAD", "REGISTRY", "Entry", "build", "get_loss"]
