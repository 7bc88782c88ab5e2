"""Tables of a comparison: as many cells as headings, gaps are dashes, intervals say what they show."""

from pathlib import Path

import pytest
from forklora.recipes.comparison import read_comparison
from forklora.recipes.comparison_tables import comparison_tables, signed_difference
from forklora.recipes.intervals import Difference

from test_comparison import TASKS, accuracy, reached
from tiny_grid import fill, grid_of


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    grid = grid_of(tmp_path_factory.mktemp("tables"), tasks=TASKS, seeds=[0, 1, 2])
    fill(grid, accuracy, reached=reached)
    return read_comparison(Path(grid.output))


def by_title(found):
    return {table.title: table for table in comparison_tables(found)}


@pytest.mark.parametrize(
    ("difference", "said"),
    [
        (Difference(None, None, None, 0), "—"),
        (Difference(0.05, None, None, 1), "+0.050, one seed, no interval"),
        (Difference(0.05, -0.01, 0.11, 3), "no difference shown (-0.010 to +0.110)"),
        (Difference(0.05, 0.01, 0.09, 3), "+0.050 (+0.010 to +0.090)"),
        (Difference(-0.05, -0.09, -0.01, 3), "-0.050 (-0.090 to -0.010)"),
        (Difference(0.0, 0.0, 0.0, 3), "no difference shown (+0.000 to +0.000)"),
    ],
)
def test_a_difference_says_what_its_interval_shows(difference, said):
    assert signed_difference(difference) == said


def test_every_row_has_a_cell_for_each_heading(found):
    tables = comparison_tables(found)
    assert [table.title for table in tables][:3] == ["products", "sums", "mean of tasks"]
    assert all(len(row) == len(table.headings) for table in tables for row in table.rows)
    assert all(cell for table in tables for row in table.rows for cell in row)


def test_the_results_hold_the_figures(found):
    table = by_title(found)["products"]
    ours = dict(zip(table.headings, table.rows[1], strict=True))
    assert (ours["arm"], ours["start"], ours["end"]) == ("ours", "0.200", "0.700")
    assert (ours["steps to 0.6"], ours["rollouts to 0.6"], ours["seconds to 0.6"]) == ("2", "32", "28")
    assert ours["end less plain"].startswith("+0.200 (")
    plain = dict(zip(table.headings, table.rows[0], strict=True))
    assert plain["end less plain"] == "—"
    assert plain["steps to 0.6"] == plain["rollouts to 0.6"] == plain["seconds to 0.6"] == "not reached"
    assert ours["end, seed 0 / 1 / 2"] == "0.700 / 0.750 / 0.650"
    assert "steps to" not in " ".join(by_title(found)["sums"].headings)


def test_a_rate_at_an_end_and_a_range_that_touches_it_say_so(found):
    rows = {(row[0], row[1]): row for row in by_title(found)["rates"].rows}
    assert rows["products", "ours"][2] == "0.01, at an end"
    assert "≥" in rows["products", "ours"][3]
    assert "≥" not in rows["products", "plain"][3]


def test_all_runs_are_listed_and_folded(found):
    table = by_title(found)["all runs"]
    assert table.folded
    assert len(table.rows) == len(found.runs) == 2 * 2 * (3 + 2 + 3)
    assert "failed or missing" not in by_title(found)


def test_what_was_never_run_is_a_dash_and_not_a_target_missed(tmp_path):
    grid = grid_of(tmp_path, tasks=TASKS[:1], seeds=[0, 1, 2])
    fill(grid, accuracy, reached=reached)
    for path in Path(grid.output).glob("products/report-s*/ours/record.json"):
        path.unlink()
    next(Path(grid.output).glob("products/report-s1-*/plain/record.json")).unlink()
    table = by_title(read_comparison(Path(grid.output)))["products"]
    plain, ours = (dict(zip(table.headings, row, strict=True)) for row in table.rows)
    assert {ours[f"{unit} to 0.6"] for unit in ("steps", "rollouts", "seconds")} == {"—"}
    assert ours["end, seed 0 / 1 / 2"] == "— / — / —"
    assert plain["end, seed 0 / 1 / 2"] == "0.500 / — / 0.400"
