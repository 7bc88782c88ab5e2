"""Inline SVG of learning curves and spectra.

Drawn by hand instead of with a plotting library: the colors are CSS variables of the page, so one drawing serves light,
dark and print; the text stays text; and the same records always give the same bytes.
The colors are told apart by readers with any color vision, and each has its own marker shape besides.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

HUES = 6
NEGLIGIBLE = 1e-12
LABEL_GAP = 15.0
LONGEST_LABEL = 18
MARKERS = (
    "M-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0-7.2 0z",
    "M-3.2-3.2h6.4v6.4h-6.4z",
    "M0-4.2L4 3.1H-4z",
    "M0-4.6L4.6 0L0 4.6L-4.6 0z",
    "M0 4.2L4-3.1H-4z",
    "M-1.4-4.2h2.8v2.8h2.8v2.8h-2.8v2.8h-2.8v-2.8h-2.8v-2.8h2.8z",
)

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One arm's line: `points` thick, with a marker where there is a note, `thin` beside it, a ring at x = `ring`."""

    label: str
    hue: int
    points: Sequence[Point]
    notes: Sequence[str] = ()
    thin: Sequence[Point] = ()
    ring: float | None = None


@dataclass(frozen=True)
class Frame:
    """A plot's outside size and inside ranges; maps data to SVG user units (y downward)."""

    width: float
    height: float
    x_range: Point
    y_range: Point
    right: float = 14.0
    left: float = 42.0
    top: float = 30.0
    bottom: float = 42.0

    def x(self, value: float) -> float:
        """Horizontal place of a data value, in user units."""
        low, high = self.x_range
        return round(self.left + (value - low) / (high - low) * (self.width - self.left - self.right), 1)

    def y(self, value: float) -> float:
        """Vertical place of a data value, in user units."""
        low, high = self.y_range
        floor = self.height - self.bottom
        return round(floor - (value - low) / (high - low) * (floor - self.top), 1)


def hue_class(index: int) -> str:
    """CSS classes of the arm at this place: one of six colors, and another dash once the colors are used up."""
    return f"h{index % HUES} d{index // HUES % 3}"


def ticks(low: float, high: float, *, count: int = 5, whole: bool = False) -> list[float]:
    """Round numbers that cover `low` to `high` at steps of 1, 2 or 5 times a power of ten, about `count` of them."""
    rough = max(high - low, 1e-9) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, max(last, first + 1) + 1)]


def learning_curves(series: Sequence[Series], *, target: float | None, x_label: str, size: Point) -> Markup:
    """Held-out accuracy against steps: one labeled line per arm, training reward thin, the target as a dashed line."""
    said = "Held-out accuracy against training steps, one line per arm"
    return line_chart(series, titles=(x_label, "held-out accuracy"), description=said, target=target, size=size)


def line_chart(
    series: Sequence[Series],
    *,
    titles: tuple[str, str],
    description: str,
    size: Point,
    target: float | None = None,
) -> Markup:
    """One labeled line per series over whole numbers; a target is a dashed line across."""
    heights = [y for line in series for _, y in (*line.points, *line.thin)] + ([] if target is None else [target])
    widths = [x for line in series for x, _ in (*line.points, *line.thin)]
    x_ticks = ticks(min(widths), max(widths), count=6 if size[0] > 500 else 4, whole=True)
    y_ticks = ticks(min(heights), max(heights))
    room = 26 + 7.2 * max(len(shorten(line.label)) for line in series)
    frame = Frame(*size, (x_ticks[0], max(widths[0] + 1, *widths)), (y_ticks[0], y_ticks[-1]), right=room)
    x_marks = [(tick, f"{tick:g}") for tick in x_ticks if tick <= frame.x_range[1]]
    marks = [(tick, f"{tick:g}") for tick in y_ticks]
    parts = [axes(frame, x_ticks=x_marks, y_ticks=marks, titles=titles)]
    if target is not None:
        parts.append(_target(frame, target))
    parts += [_line(frame, line) for line in series]
    parts.append(_end_labels(frame, series))
    return svg(frame, parts, description=description)


def eigenvalue_chart(spectra: Sequence[Series], *, size: Point) -> Markup:
    """Points (direction, eigenvalue) on a logarithmic scale; values below 1e-12 of a line's largest are left out."""
    lines = []
    for line in spectra:
        smallest = NEGLIGIBLE * max(value for _, value in line.points)
        kept = [(index, math.log10(value)) for index, value in line.points if value > smallest]
        lines.append(replace(line, points=kept))
    logs = [y for line in lines for _, y in line.points]
    low, high = math.floor(min(logs)), math.ceil(max(logs))
    high = max(high, low + 1)
    marks = [(power, f"10{_superscript(power)}") for power in range(low, high + 1, 1 + (high - low) // 8)]
    return _spectrum_panel(lines, marks, y_range=(low, high), title="eigenvalue", size=size)


def cumulative_chart(spectra: Sequence[Series], *, size: Point) -> Markup:
    """Running share of the sum of each line's eigenvalues, 0 to 1."""
    lines = [
        replace(line, points=list(enumerate(cumulative_share([value for _, value in line.points]), 1)))
        for line in spectra
    ]
    marks = [(tick, f"{tick:g}") for tick in ticks(0, 1)]
    return _spectrum_panel(lines, marks, y_range=(0, 1), title="cumulative share", size=size)


def cumulative_share(values: Iterable[float]) -> list[float]:
    """Running sums of the non-negative parts of `values` over their total; all zeros give zeros."""
    positive = [max(value, 0.0) for value in values]
    total, running, shares = math.fsum(positive), 0.0, []
    for value in positive:
        running += value
        shares.append(min(running / total, 1.0) if total else 0.0)
    return shares


def shorten(label: str) -> str:
    """The label, cut with an ellipsis where it would not fit beside a plot."""
    return label if len(label) <= LONGEST_LABEL else label[: LONGEST_LABEL - 1] + "…"


def _spectrum_panel(
    lines: Sequence[Series], marks: Sequence[tuple[float, str]], *, y_range: Point, title: str, size: Point
) -> Markup:
    longest = max(len(line.points) for line in lines)
    frame = Frame(*size, (1, max(longest, 2)), y_range)
    x_ticks = [1.0] + [tick for tick in ticks(1, max(longest, 2), whole=True) if 1 < tick <= longest]
    x_marks = [(tick, f"{tick:g}") for tick in x_ticks]
    parts = [axes(frame, x_ticks=x_marks, y_ticks=marks, titles=("direction, largest first", title))]
    parts += [_line(frame, line) for line in lines]
    return svg(frame, parts, description=f"Spectrum of the averaged covariance: {title} against direction")


def svg(frame: Frame, parts: Iterable[Markup], *, description: str) -> Markup:
    """A drawing of a frame's size, with words for those who cannot see it."""
    opening = Markup('<svg viewBox="0 0 {:g} {:g}" role="img" aria-label="{}">')
    return opening.format(frame.width, frame.height, description) + Markup("").join(parts) + Markup("</svg>")


def axes(
    frame: Frame, *, x_ticks: Iterable[tuple[float, str]], y_ticks: Iterable[tuple[float, str]], titles: tuple[str, str]
) -> Markup:
    """Rows at the y ticks, marks at the x ticks, each (place, label); titles of both axes."""
    end, floor = frame.width - frame.right, frame.height - frame.bottom
    row = Markup('<path class="grid" d="M{} {}H{:g}"/><text class="tick" x="{}" y="{}" text-anchor="end">{}</text>')
    column = Markup(
        '<path class="axis" d="M{0} {1:g}v4"/><text class="tick" x="{0}" y="{2:g}" text-anchor="middle">{3}</text>'
    )
    title = Markup('<text class="title" x="{:g}" y="{:g}" text-anchor="{}">{}</text>')
    parts = [row.format(frame.left, frame.y(y), end, frame.left - 8, frame.y(y) + 4, text) for y, text in y_ticks]
    parts.append(Markup('<path class="axis" d="M{} {:g}H{:g}"/>').format(frame.left, floor, end))
    parts += [column.format(frame.x(x), floor, floor + 18, text) for x, text in x_ticks]
    parts.append(title.format(end, frame.height - 6, "end", titles[0]))
    parts.append(title.format(2, 14, "start", titles[1]))
    return Markup("").join(parts)


def _target(frame: Frame, target: float) -> Markup:
    drawing = '<path class="target" d="M{} {}H{:g}"/><text class="tick" x="{:g}" y="{}">target {:g}</text>'
    place = frame.y(target)
    return Markup(drawing).format(frame.left, place, frame.width - frame.right, frame.left + 6, place - 5, target)


def _line(frame: Frame, line: Series) -> Markup:
    parts = []
    if line.thin:
        parts.append(Markup('<path class="thin" d="{}"/>').format(_path(frame, line.thin)))
    parts.append(Markup('<path class="line" d="{}"/>').format(_path(frame, line.points)))
    mark = Markup('<path class="mark" transform="translate({} {})" d="{}"><title>{}</title></path>')
    for (x, y), note in zip(line.points, line.notes, strict=False):
        if x == line.ring:
            parts.append(Markup('<circle class="ring" cx="{}" cy="{}" r="7"/>').format(frame.x(x), frame.y(y)))
        parts.append(mark.format(frame.x(x), frame.y(y), MARKERS[line.hue % HUES], note))
    return Markup('<g class="{}">{}</g>').format(hue_class(line.hue), Markup("").join(parts))


def _path(frame: Frame, points: Iterable[Point]) -> str:
    return "M" + "L".join(f"{frame.x(x)} {frame.y(y)}" for x, y in points)


def _end_labels(frame: Frame, series: Iterable[Series]) -> Markup:
    """Names beside the last points, pushed apart where they would overlap, each tied to its line by a leader."""
    placed = sorted((line for line in series if line.points), key=lambda line: -line.points[-1][1])
    wanted = [frame.y(line.points[-1][1]) for line in placed]
    drawing = '<g class="{}"><path class="leader" d="M{} {}L{:g} {:g}"/><text x="{:g}" y="{:g}">{}</text></g>'
    left = frame.width - frame.right + 22
    parts = []
    for line, start, place in zip(placed, wanted, _spread(wanted, frame.height - frame.bottom), strict=True):
        begin = frame.x(line.points[-1][0]) + 5
        label = shorten(line.label)
        parts.append(Markup(drawing).format(hue_class(line.hue), begin, start, left - 4, place, left, place + 4, label))
    return Markup("").join(parts)


def _spread(wanted: Sequence[float], floor: float) -> list[float]:
    """Ascending places at least one label apart, as near above or below the wanted ones as the floor allows."""
    places: list[float] = []
    for want in wanted:
        places.append(want if not places else max(want, places[-1] + LABEL_GAP))
    for index in range(len(places) - 1, -1, -1):
        limit = floor if index == len(places) - 1 else places[index + 1] - LABEL_GAP
        places[index] = min(places[index], limit)
    return places


def _superscript(power: int) -> str:
    return str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
