"""What the fields of a configuration and the signature of a forward do not tell: sizes that depend on each other.

``FIELDS``: fields of a configuration, by the name of its class, or for one model only by the name of the model's class.
``VARIANTS``: further sets of fields to make a model with, by its class, for layers that the defaults do not use.
``BATCHES``: functions from a configuration to a batch, by the model's class.
"""

from __future__ import annotations

from tests.zoo.by_hand import audio_and_vision, text_and_images

FIELDS = {**text_and_images.FIELDS, **audio_and_vision.FIELDS}
VARIANTS = {**text_and_images.VARIANTS, **audio_and_vision.VARIANTS}
BATCHES = {**text_and_images.BATCHES, **audio_and_vision.BATCHES}
