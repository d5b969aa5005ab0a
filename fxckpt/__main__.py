"""``python -m fxckpt``: the command ``fxckpt``."""

from fxckpt.cli import main

main()
