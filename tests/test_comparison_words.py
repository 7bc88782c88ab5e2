"""The words of a report: no more than the intervals show."""

from pathlib import Path

from forklora.recipes.comparison import read_comparison
from forklora.recipes.comparison_words import facts, verdict

from tiny_grid import fill, grid_of


def comparison(folder, ours, **changes):
    grid = grid_of(folder, seeds=[0, 1, 2], **changes)
    fill(grid, lambda r: ours[r.seed % 3] if r.arms[0].name == "ours" else 0.5, reached=lambda r: 2)
    return read_comparison(Path(grid.output))


def test_an_interval_above_zero_is_a_gain(tmp_path):
    said = verdict(comparison(tmp_path, [0.7, 0.71, 0.69]))
    assert "above plain at the end: ours; below it: none; no difference shown for 0 of 1" in said


def test_an_interval_that_holds_zero_shows_nothing(tmp_path):
    said = verdict(comparison(tmp_path, [0.9, 0.3, 0.6]))
    assert "above plain at the end: none; below it: none; no difference shown for 1 of 1" in said


def test_the_first_at_the_target_has_the_fewest_rollouts(tmp_path):
    assert "First at 1: plain, after 16 rollouts." in verdict(comparison(tmp_path, [0.7, 0.71, 0.69]))


def test_facts_say_what_was_compared(tmp_path):
    said = facts(comparison(tmp_path, [0.7, 0.71, 0.69]))
    assert said["budget"] == "2 steps of 8 rollouts (2 prompts x 4)"
    assert said["commit"] == "c" * 12
    assert said["machine"] == "one, 2 cores"
    assert said["runs"] == "16 done, 0 failed or missing"


def test_one_seed_shows_no_interval_and_is_said(tmp_path):
    grid = grid_of(tmp_path, seeds=[0])
    fill(grid, lambda r: 0.9 if r.arms[0].name == "ours" else 0.5)
    said = verdict(read_comparison(Path(grid.output)))
    assert "no difference shown for 0 of 1; no interval, for want of seeds, for 1" in said
