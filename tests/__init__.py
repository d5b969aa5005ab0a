"""Tests of fxckpt: a tiny-model zoo, shared helpers, and the suites built on them."""
