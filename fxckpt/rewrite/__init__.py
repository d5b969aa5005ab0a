"""Rewrite: obey the plan's tags, in the joint graph and then in the forward and backward graph."""
