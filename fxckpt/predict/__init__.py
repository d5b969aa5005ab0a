"""Predict: what a training step will cost, before it runs and without memory for it."""
