"""Medians, paired intervals, working ranges: the figures by which a comparison says what it has shown.

Decisions: what was never reached is later than everything that was; a difference counts only where its 95 % interval,
Student's t over paired seeds, leaves zero out; a rate works where at least half of the best gain is left.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_CONFIDENCE = 0.95
_KEPT_GAIN = 0.5  # share of the best gain that a rate of the working range still has


@dataclass(frozen=True)
class Difference:
    """A mean of paired differences, with the ends of its 95 % interval."""

    mean: float | None
    """None where no pair was found."""
    low: float | None
    """None for fewer than two pairs, as is `high`."""
    high: float | None
    n: int
    """Pairs."""


@dataclass(frozen=True)
class WorkingRange:
    """The rates around the best one that keep half of its gain."""

    low: float
    high: float
    open_low: bool
    """The range touches the smallest rate tried, and may go on below."""
    open_high: bool
    """The range touches the largest rate tried, and may go on above."""


def median(values: Sequence[float | None]) -> float | None:
    """The median, where None is infinity (never reached); None where the median itself is, or nothing is given."""
    ordered = sorted(math.inf if value is None else value for value in values)
    if not ordered:
        return None
    half = len(ordered) // 2
    middle = ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
    return middle if math.isfinite(middle) else None


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> Difference:
    """Mean of a - b over the seeds that both have, with its interval mean +- t s / sqrt(n), s over n - 1."""
    gaps = [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]
    n = len(gaps)
    if n == 0:
        return Difference(None, None, None, 0)
    mean = math.fsum(gaps) / n
    if n == 1:
        return Difference(mean, None, None, 1)
    spread = math.sqrt(math.fsum((gap - mean) ** 2 for gap in gaps) / (n - 1))
    half = t_quantile(n - 1) * spread / math.sqrt(n)
    return Difference(mean, mean - half, mean + half, n)


def shown(difference: Difference) -> bool:
    """Whether the interval leaves zero out; False without an interval."""
    return difference.low is not None and difference.high is not None and (difference.low > 0 or difference.high < 0)


def t_quantile(df: int) -> float:
    """The t that a Student variable with `df` >= 1 degrees of freedom stays within, on both sides, 95 % of the time.

    Bisection in x = atan(t / sqrt(df)): the probability is a finite sum of powers of cos x (Abramowitz and Stegun,
    26.7.3 and 26.7.4).
    """
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, df) < _CONFIDENCE else (low, middle)
    return math.sqrt(df) * math.tan(low)


def _within(angle: float, df: int) -> float:
    """P(|T| <= sqrt(df) tan(angle)) for Student's T."""
    sine, cosine = math.sin(angle), math.cos(angle)
    term, total = (1.0, 1.0) if df % 2 == 0 else (cosine, cosine if df > 1 else 0.0)
    for k in range(2 + df % 2, df - 1, 2):  # each term is the last one times (k - 1) / k cos^2
        term *= (k - 1) / k * cosine * cosine
        total += term
    return sine * total if df % 2 == 0 else 2 / math.pi * (angle + sine * total)


def working_range(start: float, accuracies: Mapping[float, float | None]) -> WorkingRange | None:
    """The rates around the best whose gain over `start` is at least half of the best gain.

    Between two rates the gain is taken to be linear in the logarithm of the rate. A rate whose accuracy is None failed:
    the range ends, closed, at the last rate before it. None where nothing was gained. Of equally good rates the smaller
    is the best one.
    """
    rates = sorted(accuracies)
    gains = [-math.inf if (reached := accuracies[rate]) is None else reached - start for rate in rates]
    if not rates or max(gains) <= 0:
        return None
    best = gains.index(max(gains))
    least = _KEPT_GAIN * gains[best]
    low, high = best, best
    while low > 0 and gains[low - 1] >= least:
        low -= 1
    while high < len(rates) - 1 and gains[high + 1] >= least:
        high += 1
    open_low, open_high = low == 0, high == len(rates) - 1

    def crossing(inside: int, outside: int) -> float:
        share = (gains[inside] - least) / (gains[inside] - gains[outside])  # 0 beside a rate that failed
        return rates[inside] * (rates[outside] / rates[inside]) ** share

    return WorkingRange(
        low=rates[0] if open_low else crossing(low, low - 1),
        high=rates[-1] if open_high else crossing(high, high + 1),
        open_low=open_low,
        open_high=open_high,
    )


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Places of the points that no other one beats: none is as small in both coordinates and smaller in one."""

    def beaten(mine: tuple[float, float]) -> bool:
        return any(other != mine and other[0] <= mine[0] and other[1] <= mine[1] for other in points)

    return [place for place, point in enumerate(points) if not beaten(point)]
