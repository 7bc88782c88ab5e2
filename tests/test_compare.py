"""A comparison end to end on a tiny policy: rates chosen by records, nothing twice, crashes visible, then going on."""

import json
import os
from pathlib import Path

import pytest
from forklora.recipes.compare import run_grid
from forklora.recipes.rounds import rounds

from tiny_grid import grid_of, put


def test_a_finished_comparison_starts_no_process(tmp_path, monkeypatch):
    grid = grid_of(tmp_path)
    for arm in grid.arms:
        for batch in rounds(grid, task=grid.tasks[0], arm=arm):
            for recipe in batch:
                put(recipe, accuracy=recipe.arms[0].rate)
    before = stamps(grid)
    monkeypatch.setattr("subprocess.Popen", None)
    run_grid(grid)
    assert stamps(grid) == before


def stamps(grid):
    """When each record was written, by round, seed, rate and arm."""
    folder = Path(grid.output)
    return {str(path.parent.relative_to(folder)): path.stat().st_mtime_ns for path in folder.glob("*/*/*/record.json")}


def changed(before, after):
    return {place for place in before.keys() | after.keys() if before.get(place) != after.get(place)}


def records(grid):
    return [json.loads(path.read_text()) for path in sorted(Path(grid.output).glob("*/*/*/record.json"))]


@pytest.mark.slow
def test_a_comparison_runs_resumes_and_shows_what_crashed(tmp_path):
    grid = grid_of(tmp_path, deepspeed="zero2", beside=2)
    before = set(os.listdir("/dev/shm"))
    run_grid(grid)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("deepspeed") and name not in before]
    found = records(grid)
    assert [r["status"] for r in found] == ["done"] * 2 * (3 + 2 + 1)
    reported = [r for r in found if r["recipe"]["part"]["round"] == "report"]
    tried = [r for r in found if r not in reported]  # these are asked another first question
    assert len({r["base_hash"] for r in found}) == 1
    assert len({r["step0_hash"] for r in reported}) == len({r["step0_hash"] for r in tried}) == 1
    assert all(r["outcome"]["samples"] == 2 and r["peak_memory_bytes"] > 1e7 for r in reported)
    page = Path(grid.output) / "report.html"
    assert "<html" in page.read_text()[:500].lower()

    # one more seed runs one more run for each arm and nothing else
    first = stamps(grid)
    more = grid.model_copy(update={"seeds": (0, 1)})
    run_grid(more)
    second = stamps(grid)
    assert {place.split("/")[1].rpartition("-")[0] for place in changed(first, second)} == {"report-s1"}
    assert len(second) == len(first) + 2

    # one record less runs one run, which takes the same path
    gone = next(path for path in Path(grid.output).glob("*/report-s1-*/ours/record.json"))
    told = json.loads(gone.read_text())
    gone.unlink()
    run_grid(more)
    third = stamps(grid)
    assert changed(second, third) == {str(gone.parent.relative_to(grid.output))}
    again = json.loads(gone.read_text())
    assert [p["eval_reward"] for p in again["curve"]] == [p["eval_reward"] for p in told["curve"]]

    # an arm that cannot run is a row of its own, and the others stand
    broken = more.arms[1].model_copy(update={"name": "broken", "targets": ["nowhere"]})
    result = run_grid(more.model_copy(update={"arms": (*more.arms, broken)}))
    assert stamps(grid).items() >= third.items()
    lost = [r for r in records(grid) if r["arm"] == "broken"]
    assert [(r["status"], "nowhere" in r["error"]) for r in lost] == [("failed", True)] * 3
    assert len(result["failures"]) >= 3
    assert "broken" in page.read_text()
