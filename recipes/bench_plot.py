"""The picture of a benchmark as one standalone SVG: ratios by shape on the left, growth of our own step on the right.

Drawn by hand like the plots of a run's page, with its style inside: it shows in a browser or on a project page alike.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from forklora.recipes.bench_table import growth_curves
from forklora.recipes.plots import MARKERS, Frame, ticks
from markupsafe import Markup

BARS = ("step", "update", "memory")
HEIGHT, LEFT_WIDTH, RIGHT_WIDTH = 380.0, 560.0, 400.0
_GAP = 16.0  # between labels
_STYLE = """
svg{font:12px system-ui,-apple-system,"Segoe UI",sans-serif;background:#fff}
text{fill:#444}.title{fill:#222;font-size:13px}.small{font-size:11px}
.grid{stroke:#e4e4e4;fill:none}.axis,.whisker{stroke:#333;fill:none}.one{stroke:#222;stroke-dasharray:5 4;fill:none}
.line{fill:none;stroke-width:2}.leader{fill:none;stroke-width:.8}
.h0{fill:#2563a8;stroke:#2563a8}.h1{fill:#c0571b;stroke:#c0571b}.h2{fill:#2f7d4f;stroke:#2f7d4f}
text.h0,text.h1,text.h2{stroke:none}rect{stroke:none!important}path.line,path.leader{fill:none}
"""


def bench_plot(result: Mapping[str, Any]) -> str:
    """The drawing of what bench.json holds; without any growth the right panel is left out."""
    curves = growth_curves(result)
    wide = max(LEFT_WIDTH, 60.0 + 100.0 * len(result["shapes"]))
    width = wide + (RIGHT_WIDTH if curves else 0.0)
    parts = [_ratio_panel(result["shapes"], wide)]
    if curves:
        parts.append(Markup('<g transform="translate({:g} 0)">{}</g>').format(wide, _growth_panel(curves)))
    opening = Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0:g} {1:g}" width="{0:g}" height="{1:g}" role="img" '
        'aria-label="Ratio of TRL over ours by shape, and growth of our own step"><style>{2}</style>'
    )
    return str(opening.format(width, HEIGHT, Markup(_STYLE)) + Markup("").join(parts) + Markup("</svg>")) + "\n"


def _ratio_panel(entries: Sequence[Mapping[str, Any]], width: float) -> Markup:
    highest = max([1.0, *(bar["high"] for e in entries for name in BARS if (bar := e["ratios"].get(name)))])
    marks = ticks(0, highest * 1.08)
    frame = Frame(width, HEIGHT, (0, len(entries)), (0, marks[-1]), top=58.0, bottom=58.0)
    parts = [_title("one training step: TRL's cost divided by ours", (2, 16)), _legend()]
    parts += [_grid(frame, frame.y(mark), f"{mark:g}") for mark in marks]
    for place, entry in enumerate(entries):
        parts.append(_group(frame, place, entry))
    end, floor = frame.width - frame.right, frame.height - frame.bottom
    parts.append(Markup('<path class="axis" d="M{} {:g}H{:g}"/>').format(frame.left, floor, end))
    parts.append(Markup('<path class="one" d="M{} {}H{:g}"/>').format(frame.left, frame.y(1), end))
    parts.append(_text("tokens of prompt / completion, group", (end, HEIGHT - 6), anchor="end"))
    return Markup("").join(parts)


def _legend() -> Markup:
    named = zip(BARS, ("whole step", "update", "peak memory"), (44, 138, 210), strict=True)
    return Markup("").join(
        Markup('<rect class="h{}" x="{}" y="28" width="11" height="11"/>').format(hue, x) + _text(name, (x + 16, 38))
        for hue, (_, name, x) in enumerate(named)
    )


def _group(frame: Frame, place: int, entry: Mapping[str, Any]) -> Markup:
    """The bars of one shape, with their whiskers, their numbers and the shape's name below."""
    shape, unit = entry["shape"], frame.x(1) - frame.x(0)
    middle, floor, wide = frame.x(place + 0.5), frame.height - frame.bottom, min(30.0, unit * 0.27)
    label = f"{shape['prompt']} / {shape['completion']}, {shape['group']}"
    parts = [
        _text(label, (middle, floor + 17), anchor="middle"),
        _text(f"{shape['prompts']} prompts", (middle, floor + 32), anchor="middle", kind="small"),
    ]
    if not entry["ratios"]:
        sides = " and ".join(name for side, name in (("trl", "TRL"), ("ours", "ours")) if entry[side]["failed"])
        parts.append(_text(f"{sides} failed", (middle, _off_line(frame, floor - 8)), anchor="middle"))
    for hue, name in enumerate(BARS):
        bar = entry["ratios"].get(name)
        if bar:
            parts.append(_bar(frame, bar, hue=hue, left=middle + (hue - 1.5) * wide, wide=wide))
    return Markup("").join(parts)


def _bar(frame: Frame, bar: Mapping[str, float], *, hue: int, left: float, wide: float) -> Markup:
    top, floor, center = frame.y(bar["median"]), frame.height - frame.bottom, left + wide / 2
    drawn = Markup('<rect class="h{}" x="{:.1f}" y="{}" width="{:.1f}" height="{:.1f}"/>').format(
        hue, left + 1, top, wide - 2, floor - top
    )
    if bar["low"] < bar["high"]:
        whisker = '<path class="whisker" d="M{0:.1f} {1}V{2}M{3:.1f} {1}h6M{3:.1f} {2}h6"/>'
        drawn += Markup(whisker).format(center, frame.y(bar["low"]), frame.y(bar["high"]), center - 3)
    above = _off_line(frame, frame.y(bar["high"]) - 5)
    return drawn + _text(_short(bar["median"]), (center, above), anchor="middle", kind="small")


def _off_line(frame: Frame, baseline: float) -> float:
    """The baseline of a text, moved up where the line at 1 would cross it."""
    one = frame.y(1)
    return one - 4 if one - 2 < baseline < one + 12 else baseline


def _growth_panel(curves: Sequence[tuple[str, Sequence[tuple[Any, float]]]]) -> Markup:
    """Both axes are logarithmic, so proportional growth is the diagonal."""
    lines = [(family, [(math.log2(e["factor"]), math.log2(value)) for e, value in curve]) for family, curve in curves]
    places = [place for _, line in lines for place in line]
    right = max(1.0, *(x for x, _ in places))
    low, high = math.floor(min(0.0, *(y for _, y in places)) + 1e-9), max(right, *(y for _, y in places))
    frame = Frame(RIGHT_WIDTH, HEIGHT, (0, right), (low, high), right=118.0, top=58.0, bottom=58.0)
    end, floor = frame.width - frame.right, frame.height - frame.bottom
    parts = [_title("our own step: seconds, times the first point", (2, 16))]
    parts += [_grid(frame, frame.y(power), f"{2.0**power:g}×") for power in range(low, math.floor(high) + 1)]
    parts.append(Markup('<path class="axis" d="M{} {:g}H{:g}"/>').format(frame.left, floor, end))
    parts += [_text(f"{2**p}×", (frame.x(p), floor + 17), anchor="middle") for p in range(math.floor(right) + 1)]
    parts.append(_text("what is grown, times the first point", (end, HEIGHT - 6), anchor="end"))
    diagonal = '<path class="one" d="M{} {}L{} {}"/>'
    parts.append(Markup(diagonal).format(frame.x(0), frame.y(0), frame.x(right), frame.y(right)))
    parts += [_curve(frame, line, hue) for hue, (_, line) in enumerate(lines)]
    ends = [(family, hue, frame.x(line[-1][0]), frame.y(line[-1][1])) for hue, (family, line) in enumerate(lines)]
    parts.append(_end_labels(frame, [("proportional", None, frame.x(right), frame.y(right)), *ends]))
    return Markup("").join(parts)


def _curve(frame: Frame, line: Sequence[tuple[float, float]], hue: int) -> Markup:
    points = [(frame.x(x), frame.y(y)) for x, y in line]
    path = "M" + "L".join(f"{x} {y}" for x, y in points)
    mark = Markup('<path class="h{}" transform="translate({} {})" d="{}"/>')
    marks = Markup("").join(mark.format(hue, x, y, MARKERS[hue]) for x, y in points)
    return Markup('<path class="line h{}" d="{}"/>').format(hue, path) + marks


def _end_labels(frame: Frame, ends: Sequence[tuple[str, int | None, float, float]]) -> Markup:
    """Names to the right of the panel, apart from each other, each tied to its line's end."""
    left, place, parts = frame.width - frame.right + 14, -math.inf, []
    for name, hue, x, y in sorted(ends, key=lambda end: end[3]):
        place = max(y, place + _GAP)
        kind = "" if hue is None else f"h{hue}"
        leader = Markup('<path class="leader {}" d="M{:.1f} {}L{:g} {:.1f}"/>').format(kind, x + 6, y, left - 3, place)
        parts += [leader if hue is not None else Markup(""), _text(name, (left, place + 4), kind=kind)]
    return Markup("").join(parts)


def _grid(frame: Frame, y: float, text: str) -> Markup:
    line = Markup('<path class="grid" d="M{} {}H{:g}"/>').format(frame.left, y, frame.width - frame.right)
    return line + _text(text, (frame.left - 8, y + 4), anchor="end")


def _title(text: str, place: tuple[float, float]) -> Markup:
    return _text(text, place, kind="title")


def _text(text: str, place: tuple[float, float], *, anchor: str = "start", kind: str = "") -> Markup:
    drawing = '<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>'
    return Markup(drawing).format(kind, *place, anchor, text)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"
