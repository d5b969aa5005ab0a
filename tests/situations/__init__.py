"""Situations taken from public bug reports, each with the rule that must hold under `fxckpt.transform`."""
