"""Compute exact binomial intervals [Clopper & Pearson 1934] without SciPy's 18 MB a worker."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache


@lru_cache(256)
def binomial_interval(share: float, trials: float, confidence: float) -> tuple[float, float]:
    """Compute the exact interval of a share; hits may be fractional."""
    hits, tail = share * trials, (1 - confidence) / 2
    low = 0.0 if hits <= 0 else _bisect(lambda p: _beta(p, hits, trials - hits + 1) < tail)
    high = 1.0 if hits >= trials else _bisect(lambda p: _beta(p, hits + 1, trials - hits) < 1 - tail)
    return low, high


def _bisect(is_below: Callable[[float], bool]) -> float:
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return low


def _beta(x: float, a: float, b: float) -> float:
    """Compute I_x(a, b), 0 < x < 1, by Lentz's method [DLMF 8.17.22]."""
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta(1 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    value, c, d = 1.0, 1.0, 0.0
    for step in range(1, 100_000):
        m, odd = divmod(step, 2)
        term = (-(a + m) * (a + b + m) if odd else m * (b - m)) * x / ((a + step - 1) * (a + step))
        d = 1 / ((1 + term * d) or 1e-300)
        c = (1 + term / c) or 1e-300
        value *= c * d
        if abs(c * d - 1) < 1e-10:
            break
    return math.exp(log_front) / a / value
