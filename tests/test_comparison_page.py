"""The page of a comparison: one file that loads nothing, every arm on it, every text escaped."""

import json
import re
from pathlib import Path

import pytest
from forklora.recipes.comparison import read_comparison
from forklora.recipes.comparison_page import comparison_html
from forklora.recipes.comparison_tables import comparison_tables

from test_comparison import TASKS, accuracy, reached
from tiny_grid import fill, grid_of


def page(folder):
    found = read_comparison(folder)
    return comparison_html(found, comparison_tables(found))


@pytest.fixture
def folder(tmp_path):
    grid = grid_of(tmp_path, tasks=TASKS, seeds=[0, 1, 2])
    fill(grid, accuracy, reached=reached)
    return Path(grid.output)


def test_the_page_loads_nothing_and_runs_nothing(folder):
    html = page(folder)
    assert "default-src 'none'" in html
    assert not re.findall(r'(?:src|href)="(?!data:)', html)
    assert "<script" not in html and "url(" not in html and "@import" not in html
    assert len(html) < 400_000


def test_every_arm_has_its_panels_on_every_task(folder):
    html = page(folder)
    for arm in ("plain", "ours"):
        assert html.count(f"<figcaption>{arm}</figcaption>") == 2 * 2  # curves and rates of two tasks
    assert html.count('class="pareto"') == 2 + 1  # sums have no target
    assert page(folder) == html


def test_an_error_is_shown_as_text(folder):
    path = next(folder.glob("products/trial1-*-0.1/plain/record.json"))
    error = "<b>bad</b> & worse"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "failed", "error": error}))
    html = page(folder)
    assert "&lt;b&gt;bad&lt;/b&gt; &amp; worse" in html
    assert "<b>bad" not in html


def test_a_comparison_with_nothing_reported_yet_has_a_page(folder):
    for path in folder.glob("*/report-*/*/record.json"):
        path.unlink()
    html = page(folder)
    assert "nothing is reported yet" in html
    assert 'class="band"' not in html


@pytest.mark.parametrize("points", [0, 1])
def test_curves_without_a_way_are_no_obstacle(folder, points):
    for path in folder.glob("*/report-*/*/record.json"):
        record = json.loads(path.read_text())
        curve = [point | {"rollouts": 0} for point in record["curve"][:points]]
        path.write_text(json.dumps(record | {"curve": curve}))
    assert page(folder).count('class="band"') == points * 2 * 2
