"""Capture: mark what a transformed model runs, and find the regions in its joint graph."""
