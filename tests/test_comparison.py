"""Records into the figures of a comparison: known truths come out, order and strays do not matter, gaps stay gaps."""

import json
import shutil
from pathlib import Path
from statistics import fmean, median

import pytest
from forklora.recipes.comparison import read_comparison
from forklora.recipes.refusal import Refusal

from tiny_grid import fill, grid_of

FINAL = {
    ("plain", 0): 0.5,
    ("plain", 1): 0.6,
    ("plain", 2): 0.4,
    ("ours", 0): 0.7,
    ("ours", 1): 0.75,
    ("ours", 2): 0.65,
}
REACHED = {("plain", 0): 2, ("plain", 1): None, ("plain", 2): None, ("ours", 0): 1, ("ours", 1): 2, ("ours", 2): None}
TASKS = [
    {"name": "products", "task": {"name": "multiplication", "options": {}}, "target": 0.6},
    {"name": "sums", "task": {"name": "addition", "options": {}}, "target": None},
]


def accuracy(recipe):
    """The middle rate is best in every trial; sums are a tenth worse than products."""
    arm, less = recipe.arms[0], 0.1 if recipe.part.task == "sums" else 0.0
    if recipe.part.round == "report":
        return FINAL[arm.name, recipe.seed] - less
    return {0.001: 0.3, 0.01: 0.5, 0.1: 0.5 if arm.name == "ours" else 0.2, 1.0: 0.0}[arm.rate]


def reached(recipe):
    return REACHED.get((recipe.arms[0].name, recipe.seed))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    grid = grid_of(tmp_path_factory.mktemp("comparison"), tasks=TASKS, seeds=[0, 1, 2])
    fill(grid, accuracy, reached=reached)
    return Path(grid.output)


@pytest.fixture
def mine(folder, tmp_path):
    """A copy that may be changed."""
    return shutil.copytree(folder, tmp_path / "mine")


def entry(found, task, arm):
    return next(e for e in found.entries if (e.task, e.arm) == (task, arm))


def test_medians_and_differences_are_those_of_the_records(folder):
    found = read_comparison(folder)
    ours, plain = entry(found, "products", "ours"), entry(found, "products", "plain")
    assert ours.finals == {seed: FINAL["ours", seed] for seed in (0, 1, 2)}
    assert ours.final == median(ours.finals.values()) == 0.7
    gaps = [FINAL["ours", seed] - FINAL["plain", seed] for seed in (0, 1, 2)]
    assert ours.difference.mean == pytest.approx(fmean(gaps))
    spread = (sum((g - fmean(gaps)) ** 2 for g in gaps) / 2) ** 0.5
    assert ours.difference.high - ours.difference.low == pytest.approx(2 * 4.30265 * spread / 3**0.5, rel=1e-4)
    assert plain.difference.mean == 0
    assert ours.gain.mean == pytest.approx(0.5)
    assert (ours.trained, plain.trained) == (10, 100)
    assert (ours.rate, plain.rate) == (0.01, 0.01)
    assert ours.pass_at == {1: 0.7, 2: 0.85}


def test_a_seed_that_never_reaches_the_target_counts_as_infinity(folder):
    found = read_comparison(folder)
    ours, plain = entry(found, "products", "ours"), entry(found, "products", "plain")
    assert (ours.steps_to_target, ours.rollouts_to_target, ours.seconds_to_target) == (2, 32, 28.0)
    assert (plain.steps_to_target, plain.rollouts_to_target, plain.seconds_to_target) == (None, None, None)


def test_costs_hold_what_was_measured(folder):
    costs = entry(read_comparison(folder), "products", "ours").costs
    assert (costs.init_seconds, costs.training_seconds, costs.peak_mib, costs.adapter_bytes) == (8.0, 100.0, 1024, 4096)
    assert (costs.kl, costs.text_loss, costs.untrained) == (0.25, 0.125, -0.125)
    assert (costs.changed_share, costs.stable_rank, costs.top16_energy, costs.norm) == (0.5, 1.5, 1.0, 2.0)


def test_tasks_are_averaged_seed_by_seed(folder):
    found = read_comparison(folder)
    assert [one.arm for one in found.overall] == ["plain", "ours"]
    assert found.overall[1].finals == {seed: pytest.approx(FINAL["ours", seed] - 0.05) for seed in (0, 1, 2)}
    assert found.overall[1].difference.mean == pytest.approx(0.2)


def test_rates_that_work_come_from_the_first_round(folder):
    plain, ours = (entry(read_comparison(folder), "products", arm) for arm in ("plain", "ours"))
    assert plain.trial1 == {0.001: 0.3, 0.01: 0.5, 0.1: 0.2}
    assert plain.working is not None and (plain.working.open_low, plain.working.open_high) == (False, False)
    assert 0.001 < plain.working.low < 0.01 < plain.working.high < 0.1
    assert not plain.at_end
    assert ours.at_end  # of equal rates the smaller one goes on, and it is the smallest


def test_neither_the_order_of_files_nor_strays_matter(folder, mine):
    stray = next(mine.glob("products/trial1-*-0.001/plain/record.json"))
    shutil.copytree(stray.parent.parent, mine / "products" / "trial1-s1000-0.5")
    shutil.copytree(mine / "products", mine / "another")
    before, after = read_comparison(folder), read_comparison(mine)
    assert (after.entries, after.overall, after.failures) == (before.entries, before.overall, before.failures)


def test_a_missing_seed_changes_what_depends_on_it_and_is_named(folder, mine):
    next(mine.glob("products/report-s2-*/ours/record.json")).unlink()
    before, after = read_comparison(folder), read_comparison(mine)
    assert entry(after, "products", "ours").finals.keys() == {0, 1}
    assert entry(after, "products", "ours").difference.n == 2
    assert after.overall[1].finals.keys() == {0, 1}
    for task, arm in (("products", "plain"), ("sums", "plain"), ("sums", "ours")):
        assert entry(after, task, arm) == entry(before, task, arm)
    assert after.failures == ("products ours: nothing reported for seed 2",)
    assert before.failures == ()


@pytest.mark.parametrize("content", ["{", "", "[]"])
def test_a_record_that_cannot_be_read_is_a_line_of_its_own(mine, content):
    next(mine.glob("products/report-s1-*/plain/record.json")).write_text(content)
    found = read_comparison(mine)
    assert any("unreadable" in line and "seed 1" in line for line in found.failures)
    assert entry(found, "products", "plain").finals.keys() == {0, 2}


def test_a_failed_trial_is_told_and_has_no_accuracy(mine):
    path = next(mine.glob("sums/trial1-*-0.1/plain/record.json"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "failed", "error": "out of memory"}))
    found = read_comparison(mine)
    assert entry(found, "sums", "plain").trial1[0.1] is None
    assert any("out of memory" in line for line in found.failures)


def test_a_record_without_an_outcome_falls_back_on_its_curve(mine):
    path = next(mine.glob("products/report-s0-*/ours/record.json"))
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"outcome": None, "eval_reward_final": 0.61}))
    assert entry(read_comparison(mine), "products", "ours").finals[0] == 0.61


def test_step_zero_groups_show_who_starts_elsewhere(mine):
    for path in mine.glob("products/report-*/ours/record.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"step0_hash": "d" * 64}))
    groups = read_comparison(mine).checks.step0
    assert sorted(groups["products, report"].values()) == [("ours",), ("plain",)]
    assert list(groups["sums, report"].values()) == [("plain", "ours")]


def test_notes_name_changed_checkouts_and_several_commits(mine):
    path = next(mine.glob("products/report-s0-*/ours/record.json"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dirty": True, "commit": "e" * 40}))
    said = " ".join(read_comparison(mine).checks.warnings)
    assert "uncommitted" in said and "2 commits" in said and "lies at the end" in said


@pytest.mark.parametrize(("gain", "wins"), [(0.0, False), (0.3, True)])
def test_an_arm_of_coins_must_not_win(tmp_path, gain, wins):
    arms = [
        {"name": "plain", "adapter": "lora", "optimizer": "adamw", "rates": [0.001, 0.01, 0.1]},
        {"name": "coins", "adapter": "block", "reward": "random", "rates": [0.001, 0.01, 0.1]},
    ]
    grid = grid_of(tmp_path, arms=arms, seeds=[0, 1, 2])
    fill(grid, lambda r: 0.2 + gain + 0.01 * r.seed % 0.02 if r.arms[0].name == "coins" else 0.5)
    (found,) = read_comparison(Path(grid.output)).checks.random_reward
    assert (found.arm, found.wins) == ("coins", wins)


def test_a_folder_without_a_comparison_is_refused(tmp_path, mine):
    with pytest.raises(Refusal, match="grid.json cannot be read"):
        read_comparison(tmp_path)
    for path in mine.glob("*/*/*/record.json"):
        path.unlink()
    with pytest.raises(Refusal, match="no record"):
        read_comparison(mine)


def test_a_folder_may_be_moved(folder, mine):
    assert read_comparison(mine).entries == read_comparison(folder).entries


def test_a_seed_that_failed_has_not_reached_the_target(mine):
    path = next(mine.glob("products/report-s0-*/ours/record.json"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "failed", "steps_to_target": None}))
    assert entry(read_comparison(mine), "products", "ours").steps_to_target is None  # of 2, failed and never


def test_rollouts_over_tasks_are_those_of_tasks_with_a_target(folder):
    plain, ours = read_comparison(folder).overall
    assert (plain.rollouts_to_target, ours.rollouts_to_target) == (None, 32)
