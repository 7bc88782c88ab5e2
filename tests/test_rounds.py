"""Which runs a comparison has: rates go on by their records, and what never ran is told from what does not belong."""

from forklora.recipes.rounds import kept_rates, rounds, runs_of
from forklora.recipes.run import record_path

from tiny_grid import grid_of, put


def test_the_best_rates_go_on_and_of_equals_the_smaller():
    results = {0.1: 0.5, 0.01: 0.7, 1.0: 0.7, 10.0: None}
    assert kept_rates(results, keep=1) == [0.01]
    assert kept_rates(results, keep=3) == [0.01, 1.0, 0.1]
    assert kept_rates(results, keep=4) == [0.01, 1.0, 0.1]
    assert kept_rates({1.0: None}, keep=1) == []


def test_rounds_follow_the_records(tmp_path):
    grid = grid_of(tmp_path, seeds=[0, 1])
    found = rounds(grid, task=grid.tasks[0], arm=grid.arms[0])
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
    found = rounds(grid, task=grid.tasks[0], arm=grid.arms[0])
    for recipe in next(found):
        put(recipe, "failed")
    assert next(found) == []
    assert next(found, None) is None


def test_runs_end_where_the_first_record_is_missing(tmp_path):
    grid = grid_of(tmp_path)
    plain, ours = ([r for r in runs_of(grid) if r.arms[0].name == arm.name] for arm in grid.arms)
    assert [r.part.round for r in (*plain, *ours)] == ["trial1"] * 6
    for recipe in plain:
        put(recipe, accuracy=recipe.arms[0].rate)
    found = [(r.arms[0].name, r.part.round, r.arms[0].rate) for r in runs_of(grid)]
    assert found == [
        *(("plain", "trial1", rate) for rate in (0.001, 0.01, 0.1)),
        *(("plain", "trial2", rate) for rate in (0.1, 0.01)),
        *(("ours", "trial1", rate) for rate in (0.01, 0.1, 1.0)),
    ]


def test_a_run_of_another_rate_does_not_belong(tmp_path):
    grid = grid_of(tmp_path)
    for recipe in list(runs_of(grid)):
        put(recipe)
    arms = (grid.arms[0].model_copy(update={"rates": (0.001, 0.01, 0.5)}), grid.arms[1])
    rates = {r.arms[0].rate for r in runs_of(grid.model_copy(update={"arms": arms})) if r.arms[0].name == "plain"}
    assert rates == {0.001, 0.01, 0.5}


def test_a_lost_trial_does_not_hide_what_was_reported(tmp_path):
    grid = grid_of(tmp_path)
    for batch in rounds(grid, task=grid.tasks[0], arm=grid.arms[0]):
        for recipe in batch:
            put(recipe, accuracy=recipe.arms[0].rate)
    plain = [recipe for recipe in runs_of(grid) if recipe.arms[0].name == "plain"]
    assert [recipe.part.round for recipe in plain] == ["trial1"] * 3 + ["trial2"] * 2 + ["report"]
    record_path(plain[0], plain[0].arms[0]).unlink()  # that of the smallest rate, which did not go on
    assert [recipe for recipe in runs_of(grid) if recipe.arms[0].name == "plain"] == plain
