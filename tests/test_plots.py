"""What the drawings show is what the data says: lines read back from their paths, bars from their heights."""

import math
import re
import unicodedata

import pytest
from forklora.recipes import plots
from forklora.recipes.forkmap import EDGES, finite, fork_map, is_fork, probability_class, visible, widest_forks
from hypothesis import given
from hypothesis import strategies as st

SHARES = st.floats(0, 1, allow_subnormal=False)


def read_line(svg: str, kind: str) -> list[tuple[float, float]]:
    """Corner points of the first path of this class, in user units."""
    match = re.search(rf'class="{kind}" d="M([^"]*)"', svg)
    assert match is not None
    return [(float(x), float(y)) for x, y in (pair.split(" ") for pair in match[1].split("L"))]


def token(text: str, spread: float, *candidates: tuple[str, float]) -> dict:
    """One token of tokens.json, drawn with the probability of the candidate of the same text."""
    found = dict(candidates).get(text, 0.0)
    return {"text": text, "probability": found, "spread": spread, "candidates": [list(pair) for pair in candidates]}


@given(st.floats(-1e4, 1e4), st.floats(1e-3, 1e4), st.integers(2, 9), st.booleans())
def test_ticks_cover_the_range_at_even_round_steps(low: float, width: float, count: int, whole: bool) -> None:
    marks = plots.ticks(low, low + width, count=count, whole=whole)
    steps = [after - before for before, after in zip(marks, marks[1:], strict=False)]
    assert marks[0] <= low + 1e-6 * steps[0] and marks[-1] >= low + width - 1e-6 * steps[0]
    assert steps == pytest.approx([steps[0]] * len(steps), rel=1e-4)
    assert len(marks) <= count + 3
    digits = steps[0] / 10 ** math.floor(math.log10(steps[0] * 1.001))
    assert min(abs(digits - good) for good in (1, 2, 5)) < 1e-3
    assert not whole or all(mark == int(mark) for mark in marks)


@given(st.lists(SHARES, min_size=2, max_size=12))
def test_a_curve_read_back_from_its_drawing_is_the_record(values: list[float]) -> None:
    points = list(enumerate(values))
    series = plots.Series("arm", 0, points, ["note"] * len(points), thin=[(0, 0.0), (1, 1.0)])
    svg = plots.learning_curves([series], target=0.8, x_label="steps", size=(900, 400))
    (left, floor), (right, ceiling) = read_line(svg, "thin")
    drawn = [((x - left) / (right - left), (floor - y) / (floor - ceiling)) for x, y in read_line(svg, "line")]
    assert [x for x, _ in drawn] == pytest.approx(range(len(values)), abs=0.02)
    assert [y for _, y in drawn] == pytest.approx(values, abs=0.001)
    assert svg.count("<title>note</title>") == len(values)
    height = re.search(r'class="target" d="M[^ ]* ([^H]*)H', svg)
    assert height is not None
    assert (floor - float(height[1])) / (floor - ceiling) == pytest.approx(0.8, abs=0.001)


@given(st.lists(SHARES, min_size=1, max_size=9))
def test_labels_never_overlap_or_leave_the_plot(ends: list[float]) -> None:
    series = [plots.Series(f"arm {i}", i, [(0, 0.5), (1, end)], ["", ""]) for i, end in enumerate(ends)]
    svg = plots.learning_curves(series, target=None, x_label="steps", size=(360, 330))
    places = [float(y) for y in re.findall(r'<text x="[^"]*" y="([^"]*)">arm', svg)]
    assert len(places) == len(ends)
    assert all(after - before >= 14.9 for before, after in zip(places, places[1:], strict=False))
    assert min(places) >= 30 and max(places) <= 330 - 42 + 5


def test_a_ring_marks_the_point_at_the_target() -> None:
    series = plots.Series("arm", 0, [(0, 0.5), (2, 0.7), (4, 0.9)], ["a", "b", "c"], ring=4)
    svg = plots.learning_curves([series], target=0.8, x_label="steps", size=(900, 400))
    x, y = read_line(svg, "line")[2]
    assert re.findall(r'class="ring" cx="([^"]*)" cy="([^"]*)"', svg) == [(str(x), str(y))]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=64))
def test_cumulative_share_is_the_partial_sum_over_the_total(values: list[float]) -> None:
    total = sum(values)
    expected = [sum(values[: place + 1]) / total if total else 0.0 for place in range(len(values))]
    assert plots.cumulative_share(values) == pytest.approx(expected)


def test_eigenvalues_stand_on_a_logarithmic_scale_without_numerical_zeros() -> None:
    values = [10.0 ** (1 - index) for index in range(5)] + [0.0, -1e-20]
    svg = plots.eigenvalue_chart([plots.Series("arm", 0, list(enumerate(values, 1)))], size=(430, 280))
    drawn = read_line(svg, "line")
    assert len(drawn) == 5
    drops = [after - before for (_, before), (_, after) in zip(drawn, drawn[1:], strict=False)]
    assert drops == pytest.approx([drops[0]] * 4, abs=0.11)
    assert "10⁻³" in svg


@given(st.text())
def test_visible_hides_nothing_and_changes_nothing_visible(text: str) -> None:
    shown = visible(text)
    assert not any(unicodedata.category(character)[0] in "CZ" for character in shown)
    assert visible(shown) == shown
    plain = "".join(character for character in text if unicodedata.category(character)[0] not in "CZ")
    assert visible(plain) == plain
    assert visible(" \n\t\u200b") == "·⏎⇥‹200B›"


def test_bars_are_proportional_to_spread_and_colored_by_probability() -> None:
    spreads = [0.0, 1.0, 7.5, math.nan, 10.0]
    shares = [1.0, 0.9, 0.89, 0.06, 0.01]
    tokens = [token("x", spread, ("x", share)) for spread, share in zip(spreads, shares, strict=True)]
    view = fork_map({"rows": [{"prompt": "p", "reward": None, "tokens": tokens}]})
    markup = view["rollouts"][0]["tokens"]
    assert re.findall(r"--h:(\d+)", markup) == ["0", "10", "75", "0", "100"]
    assert re.findall(r'class="t p(\d)"', markup) == ["0", "0", "1", "3", "4"]
    assert (view["tallest"], view["positions"], view["forks"]) == (10.0, 5, 4)
    assert view["tenth"] == pytest.approx(10 / 18.5)


def test_probability_classes_fall_at_the_edges() -> None:
    for place, edge in enumerate(EDGES):
        assert (probability_class(edge), probability_class(edge - 1e-9)) == (place, place + 1)


@given(st.lists(SHARES, min_size=1, max_size=6))
def test_a_fork_is_where_the_smallest_set_of_mass_098_has_two_tokens(weights: list[float]) -> None:
    total = sum(weights) or 1.0
    shares = [weight / total for weight in weights]
    covering = [size for size in range(1, len(shares) + 1) if sum(sorted(shares)[-size:]) >= 0.98]
    smallest = min(covering, default=len(shares) + 1)
    assert is_fork(token("a", 1.0, *((str(i), share) for i, share in enumerate(shares)))) == (smallest > 1)
    assert not is_fork({"text": "a"})


def test_rollouts_at_one_fork_count_once_and_all_their_draws_are_marked() -> None:
    fork = [("a", 0.6), ("b", 0.4)]
    rows = [
        {"prompt": "p", "tokens": [token(text, 3.0, *fork), token("c", 5.0, ("c", 0.5), ("d", 0.5))]} for text in "aab"
    ]
    widest = widest_forks(rows)
    assert [item["spread"] for item in widest] == [5.0, 5.0, 3.0]
    assert [item["context"] for item in widest] == ["pa", "pb", "p"]
    assert set(widest[2]["drawn"]) == {"a", "b"}


@pytest.mark.parametrize("value", [None, "3", math.nan, math.inf, -1.0])
def test_what_is_no_height_is_zero(value: object) -> None:
    assert finite(value) == 0.0
