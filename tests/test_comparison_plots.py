"""Plots of a comparison: every value is drawn where the scale says, missing ones are not drawn as numbers."""

import re

import pytest
from forklora.recipes.comparison_plots import Spot, across_seeds, curve_panel, pareto_chart, rate_panel

PLACE = re.compile(r'class="(mark|hollow)" transform="translate\(([\d.]+) ([\d.]+)\)')


def places(drawing, kind="mark"):
    return [(float(x), float(y)) for found, x, y in PLACE.findall(drawing) if found == kind]


def test_rates_stand_at_equal_steps_of_their_logarithm():
    tried = {0.01: 0.2, 0.1: 0.6, 1.0: 0.4, 10.0: None}
    drawing = rate_panel(tried, start=0.1, chosen=0.1, top=1.0, rates=(0.01, 10.0))
    marks = places(drawing)
    assert len(marks) == 3
    assert marks[1][0] - marks[0][0] == pytest.approx(marks[2][0] - marks[1][0], abs=0.2)
    heights = [y for _, y in marks]
    assert heights[1] < heights[2] < heights[0]  # up is less in SVG
    assert drawing.count('class="cross"') == 1
    assert drawing.count('class="ring"') == 1
    assert drawing.count('class="target"') == 1


def test_the_band_reaches_from_the_worst_seed_to_the_best():
    curves = {0: [(0.0, 0.1), (10.0, 0.5)], 1: [(0.0, 0.3), (10.0, 0.9)], 2: [(0.0, 0.2), (10.0, 0.1), (20.0, 1.0)]}
    assert across_seeds(curves) == [(0.0, 0.1, pytest.approx(0.2), 0.3), (10.0, 0.1, pytest.approx(0.5), 0.9)]
    assert across_seeds({}) == []
    drawing = curve_panel(curves, behind={}, target=None, widest=20.0, top=1.0)
    assert len(places(drawing)) == 2
    assert 'class="behind"' not in drawing and 'class="target"' not in drawing
    assert 'class="behind"' in curve_panel(curves, behind={0: curves[0]}, target=0.5, widest=20.0, top=1.0)


def test_a_panel_without_a_value_is_drawn_empty():
    assert places(rate_panel({0.1: None, 1.0: None}, start=None, chosen=None, top=1.0, rates=(0.1, 1.0))) == []
    assert places(curve_panel({}, behind={}, target=0.5, widest=10.0, top=1.0)) == []


def test_who_never_got_there_is_hollow_at_the_worst_end():
    spots = [Spot("few", 10, 500.0), Spot("many", 1e5, 200.0), Spot("never", 1e3, None)]
    drawing = pareto_chart(spots, title="rollouts", lower=True)
    (never,) = places(drawing, "hollow")
    assert never[1] < min(y for _, y in places(drawing))
    up = pareto_chart(spots, title="gain", lower=False)
    assert places(up, "hollow")[0][1] > max(y for _, y in places(up))


def test_only_arms_that_no_other_beats_are_joined():
    spots = [Spot("a", 10, 500.0), Spot("b", 100, 300.0), Spot("beaten", 1000, 400.0), Spot("c", 10_000, 100.0)]
    (front,) = re.findall(r'class="front" d="M([^"]+)"', pareto_chart(spots, title="rollouts", lower=True))
    assert len(front.split("L")) == 3


def test_labels_of_thirty_arms_do_not_cover_each_other():
    spots = [Spot(f"arm-{i}", 200 * (1 + i % 3), 300.0 + 10 * i) for i in range(30)]
    found = re.findall(r'class="name" x="([\d.]+)" y="([\d.]+)">([^<]+)<', pareto_chart(spots, title="t", lower=True))
    boxes = [(float(x), float(y), float(x) + 6 * len(name)) for x, y, name in found]
    assert len(boxes) == 30
    close = [
        (a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a[0] < b[2] and b[0] < a[2] and abs(a[1] - b[1]) < 9
    ]
    assert close == []


@pytest.mark.parametrize("lower", [True, False])
def test_never_is_a_line_of_its_own_off_the_scale(lower):
    spots = [Spot("a", 10, 400.0), Spot("b", 100, 390.0), Spot("never", 1000, None)]
    drawing = pareto_chart(spots, title="t", lower=lower)
    rows = {
        text: float(y) - 4
        for y, text in re.findall(r'class="tick" x="[\d.]+" y="([\d.]+)" text-anchor="end">([^<]+)', drawing)
    }
    (never,) = places(drawing, "hollow")
    assert never[1] == pytest.approx(rows["never" if lower else "unknown"], abs=0.2)
    assert never[1] not in [y for text, y in rows.items() if text not in ("never", "unknown")]
    assert "never" not in re.findall(r'class="tick"[^>]*>([^<]+)', pareto_chart(spots[:2], title="t", lower=lower))


@pytest.mark.parametrize("lower", [True, False])
def test_labels_stay_off_the_axes_and_on_the_drawing(lower):
    spots = [Spot(f"a-long-name-{i}", 101 + i % 2, None if i % 3 == 0 else 10.0 * (i % 4)) for i in range(24)]
    drawing = pareto_chart(spots, title="t", lower=lower)
    found = re.findall(r'class="name" x="([\d.]+)" y="([\d.]+)">([^<]+)<', drawing)
    assert len(found) == 24
    for x, y, name in found:
        assert float(x) >= 60 and float(x) + 6 * len(name) <= 900
        assert 30 <= float(y) + 4 and float(y) <= 420 - 42
