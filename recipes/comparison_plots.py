"""Draws a comparison: accuracy against rate and against rollouts, one small panel for each arm, and a Pareto plot.

Decisions: small panels with the same axes stay readable for thirty arms where lines in one plot do not; in each panel
of curves the baseline stands in gray behind the arm's own line.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forklora.recipes.intervals import pareto
from forklora.recipes.plots import MARKERS, Frame, Point, axes, shorten, svg, ticks
from markupsafe import Markup

PANEL = (250.0, 190.0)
WIDE = (900.0, 420.0)
_LETTER, _LINE = 6.6, 14.0  # room for a letter and a line of a label
_MOST_POWERS = 4  # labels of a logarithmic axis

Curve = Sequence[Point]
Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class Spot:
    """An arm in a Pareto plot: its trained numbers, and its height; None where it never got there."""

    label: str
    numbers: float
    height: float | None


def rate_panel(
    tried: Mapping[float, float | None], *, start: float | None, chosen: float | None, top: float, rates: Point
) -> Markup:
    """Accuracy against rate on a logarithmic axis: the start dashed, the chosen rate ringed, a cross for a failed run.

    Args:
        tried: rate to accuracy; None failed.
        start: accuracy before the first step.
        chosen: the rate that went on.
        top: upper end of the accuracies.
        rates: smallest and largest rate of the axis.
    """
    low, high = (math.log10(rate) for rate in rates)
    frame = Frame(*PANEL, (low - 0.15, high + 0.15), (0.0, top), left=34.0, top=18.0, bottom=34.0)
    parts = [axes(frame, x_ticks=_powers(low, high), y_ticks=_shares(top), titles=("", ""))]
    if start is not None:
        parts.append(_level(frame, start))
    known = [(math.log10(rate), value) for rate, value in sorted(tried.items()) if value is not None]
    parts.append(_curve(frame, known, style="line"))
    for rate, value in sorted(tried.items()):
        x = frame.x(math.log10(rate))
        if value is None:
            parts.append(
                Markup('<text class="cross" x="{}" y="{}" text-anchor="middle">✕</text>').format(x, frame.y(0))
            )
            continue
        if rate == chosen:
            parts.append(Markup('<circle class="ring" cx="{}" cy="{}" r="7"/>').format(x, frame.y(value)))
        parts.append(_mark(x, frame.y(value), note=f"rate {rate:g}: {value:.3f}"))
    return svg(frame, [_colored(parts)], description="Accuracy against rate")


def curve_panel(
    curves: Mapping[int, Curve], *, behind: Mapping[int, Curve], target: float | None, widest: float, top: float
) -> Markup:
    """Accuracy against rollouts: the mean over seeds in a band from the worst to the best of them.

    Args:
        curves: (rollouts, accuracy) of each evaluation, by seed.
        behind: the same of the baseline, drawn in gray.
        target: drawn as a dashed line.
        widest: upper end of the rollouts.
        top: upper end of the accuracies.
    """
    frame = Frame(*PANEL, (0.0, widest), (0.0, top), left=34.0, top=18.0, bottom=34.0)
    marks = [(tick, f"{tick:,.0f}") for tick in ticks(0, widest, count=3, whole=True) if tick <= widest]
    parts = [axes(frame, x_ticks=marks, y_ticks=_shares(top), titles=("", ""))]
    if target is not None:
        parts.append(_level(frame, target))
    parts.append(_curve(frame, [(x, mean) for x, _, mean, _ in across_seeds(behind)], style="behind"))
    mine = across_seeds(curves)
    if mine:
        there, back = [(x, high) for x, _, _, high in mine], [(x, low) for x, low, _, _ in reversed(mine)]
        band = "M" + "L".join(f"{frame.x(x)} {frame.y(y)}" for x, y in (*there, *back)) + "Z"
        middle = _curve(frame, [(x, mean) for x, _, mean, _ in mine], style="line")
        dots = [
            _mark(frame.x(x), frame.y(mean), note=f"{x:,.0f} rollouts: {mean:.3f} ({low:.3f} to {high:.3f})", size=0.6)
            for x, low, mean, high in mine
        ]
        parts.append(_colored([Markup('<path class="band" d="{}"/>').format(band), middle, *dots]))
    return svg(frame, parts, description="Held-out accuracy against rollouts, the baseline behind")


def across_seeds(curves: Mapping[int, Curve]) -> list[tuple[float, float, float, float]]:
    """(rollouts, lowest, mean, highest) wherever every seed has a value."""
    if not curves:
        return []
    each = [dict(curve) for curve in curves.values()]
    shared = sorted(set.intersection(*(set(one) for one in each)))
    rows = [(x, [one[x] for one in each]) for x in shared]
    return [(x, min(values), math.fsum(values) / len(values), max(values)) for x, values in rows]


def pareto_chart(spots: Sequence[Spot], *, title: str, lower: bool) -> Markup:
    """Height against trained numbers on a logarithmic axis; arms that no other beats on both are joined.

    An arm without a height is hollow, on a line of its own beyond the worst end. Each arm has its name beside it.

    Args:
        spots: the arms.
        title: of the heights.
        lower: whether lower is better.
    """
    known = [spot for spot in spots if spot.height is not None]
    heights = [spot.height for spot in known if spot.height is not None] or [0.0, 1.0]
    y_ticks = ticks(min(0.0, *heights), max(heights))
    if len(known) < len(spots):  # room for those that never got there
        beyond = y_ticks[1] - y_ticks[0]
        y_ticks = [*y_ticks, y_ticks[-1] + beyond] if lower else [y_ticks[0] - beyond, *y_ticks]
    numbers = [math.log10(spot.numbers) for spot in spots]
    left, right = math.floor(min(numbers)), max(math.ceil(max(numbers)), math.floor(min(numbers)) + 1)
    marks, worst = [(tick, f"{tick:,g}") for tick in y_ticks], 0.0
    if len(known) < len(spots):
        worst = 2 * y_ticks[-1] - y_ticks[-2] if lower else 2 * y_ticks[0] - y_ticks[1]
        marks = sorted([*marks, (worst, "never" if lower else "unknown")])
    frame = Frame(*WIDE, (left, right), (marks[0][0], marks[-1][0]), left=60.0, right=130.0)
    parts = [axes(frame, x_ticks=_powers(left, right), y_ticks=marks, titles=("trained numbers", title))]
    costs = [(spot.numbers, (spot.height or 0.0) * (1 if lower else -1)) for spot in known]
    best = sorted((known[place] for place in pareto(costs)), key=lambda spot: spot.numbers)
    parts.append(_curve(frame, [(math.log10(s.numbers), s.height or 0.0) for s in best], style="front"))
    places = [(frame.x(math.log10(s.numbers)), frame.y(worst if s.height is None else s.height)) for s in spots]
    for spot, (x, y) in zip(spots, places, strict=True):
        said = marks[-1 if lower else 0][1] if spot.height is None else f"{spot.height:,.3g}"
        parts.append(_mark(x, y, note=f"{spot.label}: {spot.numbers:,.0f} numbers, {said}", hollow=spot.height is None))
    parts += _labels(frame, [spot.label for spot in spots], places)
    return svg(frame, [_colored(parts)], description=f"{title} against trained numbers")


def _labels(frame: Frame, names: Sequence[str], places: Sequence[Point]) -> list[Markup]:
    """Names beside their marks, each moved to the nearest free place inside, with a line back where it is far."""
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in places]
    drawn = []
    for name, (x, y) in sorted(zip(names, places, strict=True), key=lambda pair: pair[1][1]):
        label = shorten(name)
        width = _LETTER * len(label)
        tries = [(x + 9, y + step * _LINE / 2) for step in sorted(range(-16, 17), key=lambda step: (abs(step), -step))]
        tries = [place for pair in ((t, (x - 9 - width, t[1])) for t in tries) for place in pair]
        boxes = [(left, top - 7, left + width, top + 6) for left, top in tries]
        inside = [box for box in boxes if _inside(frame, box)] or boxes
        free = next((box for box in inside if not any(_meet(box, other) for other in taken)), inside[0])
        taken.append(free)
        middle = free[1] + 7
        if abs(middle - y) > _LINE:
            edge = free[0] if free[0] > x else free[2]
            drawn.append(Markup('<path class="leader" d="M{:g} {:g}L{:g} {:g}"/>').format(x, y, edge, middle))
        drawn.append(Markup('<text class="name" x="{:g}" y="{:g}">{}</text>').format(free[0], middle + 4, label))
    return drawn


def _inside(frame: Frame, box: Box) -> bool:
    """Off the labels of both axes."""
    left, top, right, bottom = box
    across = left > frame.left and right < frame.width
    return across and top >= frame.top - _LINE / 2 and bottom < frame.height - frame.bottom


def _meet(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _powers(low: float, high: float) -> list[tuple[float, str]]:
    """Powers of ten between two logarithms, few enough to be read."""
    found = list(range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1))
    step = max(1, math.ceil(len(found) / (_MOST_POWERS + 2)))
    return [(float(power), f"{10**power:,}" if power >= 0 else f"{10.0**power:g}") for power in found[::step]]


def _shares(top: float) -> list[tuple[float, str]]:
    return [(tick, f"{tick:g}") for tick in ticks(0, top, count=5) if tick <= top + 1e-9]


def _level(frame: Frame, value: float) -> Markup:
    drawing = '<path class="target" d="M{} {}H{:g}"/>'
    return Markup(drawing).format(frame.left, frame.y(value), frame.width - frame.right)


def _curve(frame: Frame, points: Curve, *, style: str) -> Markup:
    if not points:
        return Markup("")
    path = "M" + "L".join(f"{frame.x(x)} {frame.y(y)}" for x, y in points)
    return Markup('<path class="{}" d="{}"/>').format(style, path)


def _mark(x: float, y: float, *, note: str, size: float = 1.0, hollow: bool = False) -> Markup:
    drawing = '<path class="{}" transform="translate({:g} {:g}) scale({:g})" d="{}"><title>{}</title></path>'
    return Markup(drawing).format("hollow" if hollow else "mark", x, y, size, MARKERS[0], note)


def _colored(parts: Sequence[Markup]) -> Markup:
    return Markup('<g class="h0">{}</g>').format(Markup("").join(parts))
