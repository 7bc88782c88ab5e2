"""Tells which runs a comparison has, round by round, from the records of the rounds before.

Decisions: records are all there is; what goes on to the next round is read off them every time, so that a comparison
can be stopped anywhere, and records that no longer belong to it are told from those that do.
"""

from collections.abc import Iterator, Sequence
from itertools import product

from forklora.recipes.config import Recipe
from forklora.recipes.grid import Grid, GridArm, GridTask
from forklora.recipes.run import read_record


def rounds(grid: Grid, *, task: GridTask, arm: GridArm) -> Iterator[list[Recipe]]:
    """The runs of an arm on a task, round by round; each round waits for the records of the one before.

    Nothing is reported where every rate of a round has failed.
    """
    rates: Sequence[float] = sorted(set(arm.rates))
    for place, trial in enumerate(grid.trials):
        tried = {rate: grid.trial(task, arm, rate=rate, round_=place) for rate in rates}
        yield list(tried.values())
        rates = kept_rates({rate: _result(recipe) for rate, recipe in tried.items()}, keep=trial.keep)
    for rate in rates:
        yield [grid.report(task, arm, rate=rate, seed=seed) for seed in grid.seeds]


def kept_rates(results: dict[float, float | None], *, keep: int) -> list[float]:
    """The best of the rates by their results, best first; of equal ones the smaller. None is no result."""
    found = [(-result, rate) for rate, result in results.items() if result is not None]
    return [rate for _, rate in sorted(found)[:keep]]


def _result(recipe: Recipe) -> float | None:
    record = read_record(recipe, recipe.arms[0])
    return record.get("eval_reward_final") if record.get("status") == "done" else None


def runs_of(grid: Grid) -> Iterator[Recipe]:
    """Every run that a comparison has by now: those with a record, and what the first round without all of them lacks.

    A later round is there where it has a record, though one of an earlier round was lost since.
    """
    for task, arm in product(grid.tasks, grid.arms):
        whole = True
        for batch in rounds(grid, task=task, arm=arm):
            found = [bool(read_record(recipe, arm)) for recipe in batch]
            if not whole and not any(found):
                break
            yield from batch
            whole = whole and all(found)
