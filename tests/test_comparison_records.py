"""Whatever a record holds, the report is written: figures that are not finite are missing, other shapes are told."""

import json
import math
import shutil
from pathlib import Path

import pytest
from forklora.recipes.comparison import read_comparison
from forklora.recipes.comparison_report import write_comparison

from tiny_grid import fill, grid_of

PLACE = "products/report-s1-*/ours/record.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    grid = grid_of(tmp_path_factory.mktemp("comparison"), seeds=[0, 1, 2])
    fill(grid, lambda recipe: 0.3 + 0.1 * recipe.seed % 0.3, reached=lambda recipe: 1)
    return Path(grid.output)


@pytest.fixture
def path(folder, tmp_path):
    return next(shutil.copytree(folder, tmp_path / "mine").glob(PLACE))


def change(path, keys, value):
    """Put a value where the keys lead to; without one take away what is there."""
    record = json.loads(path.read_text())
    here = record
    for key in keys[:-1]:
        here = here[key]
    here.update({keys[-1]: value}) if value != "gone" else here.pop(keys[-1])
    path.write_text(json.dumps(record))
    return record


def ours(path):
    return next(e for e in read_comparison(path.parents[3]).entries if e.arm == "ours")


def places(value, before=()):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*before, key)
            yield from places(inner, (*before, key))
    if isinstance(value, list):
        for place, inner in enumerate(value):
            yield from places(inner, (*before, place))


def test_no_record_keeps_the_report_from_being_written(path, folder):
    whole = path.read_text()
    mine = path.parents[3]
    expected = {e.arm: e for e in read_comparison(folder).entries}["plain"]
    for keys in [keys for keys in places(json.loads(whole)) if keys[0] != "recipe" or len(keys) == 1]:
        for value in ("gone", None, math.nan, "?", [1]):
            path.write_text(whole)
            change(path, keys, value)
            found = read_comparison(mine)
            assert found.entries[0] == expected, keys
            told = [line for line in found.failures if "seed 1" in line]
            assert len(found.entries[1].finals) == 3 or told, (keys, value)
    write_comparison(mine)  # of the last one


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "gone"])
def test_figures_that_are_no_numbers_are_missing_and_never_zero(path, value):
    for keys in (
        ("outcome", "accuracy"),
        ("eval_reward_final",),
        ("outcome", "pass_at", "2"),
        ("outcome", "kl_to_base"),
    ):
        change(path, keys, value)
    for other in path.parents[3].glob("products/report-s[02]-*/ours/record.json"):
        change(other, ("outcome", "pass_at", "2"), value)
    found = ours(path)
    assert found.finals.keys() == {0, 2}
    assert found.pass_at.keys() == {1}
    assert found.costs.kl == 0.25


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        (("curve",), 3.5, "curve is a float"),
        (("curve",), [1], "points that are no objects"),
        (("outcome",), "good", "outcome is a str"),
        (("outcome", "update"), [], "outcome.update is a list"),
        (("step0_hash",), 7, "step0_hash is a int"),
        (("status",), "gone", "no status"),
    ],
)
def test_a_record_of_another_shape_is_unreadable_and_says_why(path, keys, value, said):
    change(path, keys, value)
    assert ours(path).finals.keys() == {0, 2}
    (line,) = ours(path).failures
    assert "unreadable" in line and said in line


def test_a_failed_run_without_a_word_says_so(path):
    change(path, ("status",), "failed")
    assert ours(path).failures[0].endswith("failed: the record says failed and no more")


def test_hashes_that_were_not_recorded_are_a_group_of_their_own(path):
    change(path, ("step0_hash",), "gone")
    groups = read_comparison(path.parents[3]).checks.step0["products, report"]
    assert groups["not recorded"] == ("ours",)
