"""Medians, intervals and ranges against tables, enumeration and drawing at random."""

import math
import random
import statistics

import pytest
from forklora.recipes.intervals import Difference, median, paired, pareto, shown, t_quantile, working_range
from hypothesis import given
from hypothesis import strategies as st

# Two-sided 95 % points of Student's t, as printed in tables.
TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 9: 2.262, 10: 2.228, 19: 2.093,
         30: 2.042, 60: 2.000, 120: 1.980, 1000: 1.962}  # fmt: skip
SHARES = st.floats(0, 1, allow_subnormal=False)
BY_SEED = st.dictionaries(st.integers(0, 6), SHARES, max_size=6)


@pytest.mark.parametrize("df", TABLE)
def test_quantiles_are_those_of_the_tables(df):
    assert t_quantile(df) == pytest.approx(TABLE[df], abs=6e-4)


@pytest.mark.parametrize("df", [1, 2, 3, 4, 5, 8, 11])
def test_the_density_between_the_quantiles_integrates_to_95_percent(df):
    scale = math.gamma((df + 1) / 2) / (math.sqrt(df * math.pi) * math.gamma(df / 2))
    end, n = t_quantile(df), 4000
    each = [scale * (1 + (end * (i + 0.5) / n) ** 2 / df) ** (-(df + 1) / 2) for i in range(n)]
    assert 2 * end / n * math.fsum(each) == pytest.approx(0.95, abs=1e-6)


@given(st.lists(st.one_of(st.none(), st.floats(0, 1e6)), max_size=9))
def test_the_median_leaves_half_on_each_side_with_never_as_the_latest(values):
    found = median(values)
    if found is None:
        never = sum(value is None for value in values)
        assert not values or 2 * never >= len(values)
        return
    assert 2 * sum(value is not None and value < found for value in values) <= len(values)
    assert 2 * sum(value is None or value > found for value in values) <= len(values)
    if None not in values:
        assert found == statistics.median(values)


def test_medians_with_seeds_that_never_get_there():
    assert median([3, 3, None]) == 3
    assert median([3, None]) is None
    assert median([None]) is None
    assert median([]) is None


@given(BY_SEED, BY_SEED, st.randoms(use_true_random=False))
def test_pairs_are_made_by_seed_in_any_order(a, b, chance):
    gaps = [a[seed] - b[seed] for seed in a if seed in b]
    found = paired(a, b)
    shuffled = (dict(chance.sample(list(one.items()), len(one))) for one in (a, b))
    assert found == paired(*shuffled)
    assert found.n == len(gaps)
    if not gaps:
        assert (found.mean, found.low, found.high) == (None, None, None)
    elif len(gaps) == 1:
        assert (found.mean, found.low, found.high) == (gaps[0], None, None)
    else:
        half = t_quantile(len(gaps) - 1) * statistics.stdev(gaps) / math.sqrt(len(gaps))
        assert found.mean == pytest.approx(statistics.fmean(gaps), abs=1e-12)
        assert (found.low, found.high) == pytest.approx((found.mean - half, found.mean + half), abs=1e-9)
    back = paired(b, a)
    assert back.n == found.n and shown(back) == shown(found)
    if found.low is not None:
        assert (back.mean, back.low, back.high) == pytest.approx((-found.mean, -found.high, -found.low), abs=1e-12)


def test_intervals_hold_the_truth_as_often_as_they_say():
    chance, truth, draws = random.Random(5), 0.03, 3000
    held = 0
    for _ in range(draws):
        found = paired({seed: truth + chance.gauss(0, 0.1) for seed in range(3)}, dict.fromkeys(range(3), 0.0))
        held += found.low <= truth <= found.high
    assert held / draws == pytest.approx(0.95, abs=0.015)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.01, 0.2, True), (-0.2, -0.01, True), (-0.1, 0.1, False), (0.0, 0.1, False), (None, None, False)],
)
def test_a_difference_is_shown_only_where_zero_is_left_out(low, high, expected):
    assert shown(Difference(0.05, low, high, 3)) is expected


def test_a_working_range_is_cut_where_half_of_the_best_gain_is_crossed():
    found = working_range(0.2, {0.001: 0.2, 0.01: 0.6, 0.1: 0.4, 1.0: 0.2})
    # 0.4 is the least: halfway up from 0.001 in the logarithm of the rate, and exactly at 0.1
    assert (found.low, found.high) == pytest.approx((10**-2.5, 0.1))
    assert (found.open_low, found.open_high) == (False, False)


def test_a_working_range_stays_open_at_an_end_that_still_works():
    found = working_range(0.2, {0.01: 0.5, 0.1: 0.6, 1.0: 0.2})
    assert (found.low, found.open_low, found.open_high) == (0.01, True, False)
    alone = working_range(0.2, {0.01: 0.5})
    assert (alone.low, alone.high, alone.open_low, alone.open_high) == (0.01, 0.01, True, True)


RATES = st.sampled_from([0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0])


@given(st.dictionaries(RATES, st.one_of(st.none(), SHARES), max_size=7), SHARES)
def test_a_working_range_is_that_of_a_fine_walk_from_the_best_rate(accuracies, start):
    found = working_range(start, accuracies)
    gains = {rate: -1.0 if value is None else value - start for rate, value in accuracies.items()}
    if not gains or max(gains.values()) <= 0:
        assert found is None
        return
    best, rates = min(gains, key=lambda rate: (-gains[rate], rate)), sorted(gains)

    def works(rate):
        after = next(i for i, known in enumerate(rates) if known >= rate)
        if rates[after] == rate:
            return gains[rate] >= gains[best] / 2
        a, b = rates[after - 1], rates[after]
        if accuracies[a] is None or accuracies[b] is None:
            return False
        share = math.log(rate / a) / math.log(b / a)
        return (1 - share) * gains[a] + share * gains[b] >= gains[best] / 2

    for end, is_open, last in ((found.low, found.open_low, rates[0]), (found.high, found.open_high, rates[-1])):
        way = [best * (end / best) ** (i / 50) for i in range(50)]
        assert all(works(min(max(rate, rates[0]), rates[-1])) for rate in way if end != best)
        beyond = end * (1.001 if last == rates[-1] else 0.999)
        assert is_open == (not rates[0] < beyond < rates[-1] and works(last))
        assert is_open or not rates[0] < beyond < rates[-1] or not works(beyond)


def test_a_working_range_ends_at_the_last_rate_before_one_that_failed():
    found = working_range(0.2, {0.01: 0.6, 0.1: 0.5, 1.0: None, 10.0: 0.7})
    assert (found.low, found.high, found.open_low, found.open_high) == (10.0, 10.0, False, True)
    found = working_range(0.2, {0.001: None, 0.01: 0.6, 0.1: 0.5, 1.0: None})
    assert (found.low, found.high, found.open_low, found.open_high) == (0.01, 0.1, False, False)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=9))
def test_the_front_is_what_no_other_point_beats(points):
    front = pareto(points)
    for place, (x, y) in enumerate(points):
        beaten = any(a <= x and b <= y and (a < x or b < y) for a, b in points)
        assert (place in front) == (not beaten)
