"""A comparison end to end on a tiny policy: rates chosen by records, nothing twice, crashes visible, then going on."""

import json
from pathlib import Path

import pytest
from forklora.recipes.compare import kept_rates, rounds, run_grid
from forklora.recipes.files import write_json
from forklora.recipes.grid import Grid
from forklora.recipes.run import record_path

from tiny_policy import recipe_of

TRIALS = [{"steps": 1, "keep": 2}, {"steps": 2, "keep": 1}]


def grid_of(folder, **changes):
    """Two arms, three rates, one task, two steps, on a tiny saved policy."""
    recipe = recipe_of(folder)
    content = {
        "name": "tiny", "description": "Two arms.", "model": recipe.model.model_dump(),
        "tasks": [{"name": "products", "task": {"name": "multiplication", "options": {}}, "target": 1.0}],
        "sampling": {"max_new_tokens": 5, "stop": ["\n"]}, "prompts": 2, "group": 4, "steps": 2, "seeds": [0],
        "trials": TRIALS, "choosing": {"prompts": 3, "samples": 2},
        "evaluation": {"every": 1, "prompts": 3, "samples": 2}, "outcome": {"samples": 2, "kl_prompts": 2},
        "forks": {"prompts": 4}, "baseline": "plain",
        "arms": [
            {"name": "plain", "adapter": "lora", "optimizer": "adamw", "rates": [0.001, 0.01, 0.1]},
            {"name": "ours", "adapter": "block", "rates": [0.01, 0.1, 1.0]},
        ],
        "output": str(folder / "grid"),
    }  # fmt: skip
    return Grid.model_validate(content | changes)


def put(recipe, status="done", accuracy=0.0):
    """A record that stands where this run's would."""
    content = {"status": status, "recipe": recipe.model_dump(mode="json"), "deepspeed": None}
    write_json(record_path(recipe, recipe.arms[0]), content | {"eval_reward_final": accuracy})


def test_the_best_rates_go_on_and_of_equals_the_smaller():
    results = {0.1: 0.5, 0.01: 0.7, 1.0: 0.7, 10.0: None}
    assert kept_rates(results, keep=1) == [0.01]
    assert kept_rates(results, keep=3) == [0.01, 1.0, 0.1]
    assert kept_rates(results, keep=4) == [0.01, 1.0, 0.1]
    assert kept_rates({1.0: None}, keep=1) == []


def test_rounds_follow_the_records(tmp_path):
    grid = grid_of(tmp_path, seeds=[0, 1])
    found = rounds(grid, grid.tasks[0], grid.arms[0])
    first = next(found)
    assert [r.arms[0].rate for r in first] == [0.001, 0.01, 0.1]
    assert {(r.steps, r.part.round) for r in first} == {(1, "trial1")}
    for recipe, (status, accuracy) in zip(first, [("done", 0.2), ("failed", 0.9), ("done", 0.3)], strict=True):
        put(recipe, status, accuracy)
    second = next(found)
    assert [(r.arms[0].rate, r.steps, r.part.round) for r in second] == [(0.1, 2, "trial2"), (0.001, 2, "trial2")]
    for recipe, accuracy in zip(second, [0.1, 0.4], strict=True):
        put(recipe, accuracy=accuracy)
    assert [(r.arms[0].rate, r.seed, r.part.round) for r in next(found)] == [(0.001, 0, "report"), (0.001, 1, "report")]
    assert next(found, None) is None


def test_nothing_is_reported_where_all_rates_failed(tmp_path):
    grid = grid_of(tmp_path)
    found = rounds(grid, grid.tasks[0], grid.arms[0])
    for recipe in next(found):
        put(recipe, "failed")
    assert next(found) == []
    assert next(found, None) is None


def test_a_finished_comparison_starts_no_process(tmp_path, monkeypatch):
    grid = grid_of(tmp_path)
    for arm in grid.arms:
        for batch in rounds(grid, grid.tasks[0], arm):
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
    run_grid(grid)
    found = records(grid)
    assert [r["status"] for r in found] == ["done"] * 2 * (3 + 2 + 1)
    assert len({r["base_hash"] for r in found}) == len({r["step0_hash"] for r in found}) == 1
    reported = [r for r in found if r["recipe"]["part"]["round"] == "report"]
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
