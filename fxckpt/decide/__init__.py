"""Decide: which layers are boundary layers, what becomes of each region, and the plan that says so."""
