"""Measure how fast operators are by their sizes: what a plan's seconds are made of."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from fxckpt.decide.device import AttentionRate, ProductRate

PRODUCT_SIZES = (32, 256, 2048, 16384)
"""Rows, summands and columns of the products measured, each with each, as far as the largest takes no second."""
BATCHED_SIZES = (32, 512)
BATCHED_VALUES = 1 << 22
"""Values of the largest matrix of many products done at once, all together."""
TOKENS, HEADS = (128, 512, 1024, 2048), (32, 128)
"""Sizes of the attention measured, each with each."""
ATTENTION_VALUES = 1 << 22
"""Scores of the attention measured, all heads together."""
VALUES = 1 << 22
"""Values of the tensors that functions are measured on."""
ROW = 256
"""Values that go to one place where rows are scattered."""
FRESH_BYTES = 64 << 20
"""More than a C library keeps for the next allocation."""
CALLS = 1000
REPEATS = 3
LEAST_SECONDS = 2e-3
"""What takes less is done several times between two looks at the clock."""


def product_rates(device: torch.device, dtype: torch.dtype, fastest: float) -> Iterator[ProductRate]:
    """Rates of products, one by one and many at once, by size.

    Args:
        device: where.
        dtype: of the matrices.
        fastest: FLOP/s of large products.
    """
    name = str(dtype).removeprefix("torch.")
    for batched, sizes in ((False, PRODUCT_SIZES), (True, BATCHED_SIZES)):
        known = [size for size in sizes if batched or 2 * size**3 <= fastest]
        for m, k, n in itertools.product(known, repeat=3):
            count = max(BATCHED_VALUES // max(m * k, k * n, m * n), 2) if batched else 1
            a = torch.randn(*[count] * batched, m, k, device=device).to(dtype)
            b = torch.randn(*[count] * batched, k, n, device=device).to(dtype)
            seconds = median_seconds(functools.partial(torch.matmul, a, b), device)
            yield ProductRate(name, batched, m, k, n, 2 * count * m * k * n / seconds)


def attention_rates(device: torch.device, dtype: torch.dtype) -> Iterator[AttentionRate]:
    """Rates of ``scaled_dot_product_attention`` and of its gradient, by size."""
    name = str(dtype).removeprefix("torch.")
    for is_causal, tokens, head in itertools.product((False, True), TOKENS, HEADS):
        heads = max(ATTENTION_VALUES // tokens**2, 1)
        shape = (1, heads, tokens, head)
        q, k, v = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))
        attend = functools.partial(F.scaled_dot_product_attention, q, k, v, is_causal=is_causal)
        with torch.no_grad():
            forward = median_seconds(attend, device)
        out = attend()
        grad = torch.randn_like(out)
        gradient = functools.partial(torch.autograd.grad, out, (q, k, v), grad, retain_graph=True)
        backward = median_seconds(gradient, device)
        work = 2 * 2 * heads * tokens**2 * head  # two products forward, five backward
        yield AttentionRate(name, is_causal, tokens, head, work / forward, 2.5 * work / backward)


def function_rates(device: torch.device) -> dict[str, float]:
    """Values per second of functions that take many instructions, and of adding rows where indices say, by name."""
    x = torch.randn(VALUES, device=device)
    out = torch.empty_like(x)
    functions = {"exp": torch.exp, "tanh": torch.tanh, "erf": torch.erf}
    rates = {name: VALUES / median_seconds(functools.partial(f, x, out=out), device) for name, f in functions.items()}
    rows = x[: VALUES // 4].view(-1, ROW)
    places = torch.randperm(len(rows), device=device)
    scatter = functools.partial(torch.zeros_like(rows).index_put_, (places,), rows, accumulate=True)
    return {**rates, "scatter": rows.numel() / median_seconds(scatter, device)}


def memory_rate(device: torch.device) -> float:
    """Bytes per second that a pointwise operator reads and writes, in memory that the process has already."""
    a, b, out = (torch.ones(FRESH_BYTES // 4, device=device) for _ in range(3))
    return 3 * out.nbytes / median_seconds(functools.partial(torch.add, a, b, out=out), device)


def fresh_rate(device: torch.device) -> float:
    """Bytes per second of first writes to memory new to the process, beside what writing takes anyway."""
    old = torch.ones(FRESH_BYTES, dtype=torch.uint8, device=device)
    again = median_seconds(functools.partial(old.fill_, 1), device)
    first = median_seconds(lambda: torch.ones(FRESH_BYTES, dtype=torch.uint8, device=device), device)
    return FRESH_BYTES / max(first - again, again / 10)


def call_seconds(device: torch.device) -> float:
    """Seconds of an operator that has next to nothing to do."""
    x = torch.ones(1, device=device)

    def calls() -> None:
        for _ in range(CALLS):
            torch.neg(x)

    return median_seconds(calls, device) / CALLS


def median_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of `run`, which has run before."""
    run()
    count = max(1, round(LEAST_SECONDS / next(timed(run, device))))

    def several() -> None:
        for _ in range(count):
            run()

    times = timed(several, device)
    return statistics.median(next(times) for _ in range(REPEATS)) / count


def timed(run: Callable[[], object], device: torch.device) -> Iterator[float]:
    """Seconds of `run`, again and again."""
    while True:
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        yield time.perf_counter() - start
