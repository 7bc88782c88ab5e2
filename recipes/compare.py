"""Runs a comparison: rates tried in rounds, the best one reported over seeds, nothing repeated that is done.

Decisions: an arm's round on a task is one launch, whose runs follow each other in the same processes, so that imports,
and bases of the same forks, are paid once; each run writes its record when it has ended, whole. A launch that dies is
held against the run it died in, and goes on with the next one. Records are all there is: what goes on to the next
round is read off them every time.
"""

import contextlib
import subprocess
import time
from pathlib import Path
from typing import Any

from forklora.recipes.config import Recipe
from forklora.recipes.files import write_json
from forklora.recipes.grid import Grid, GridArm, GridTask
from forklora.recipes.launch import ranks_running
from forklora.recipes.preflight import check_recipe
from forklora.recipes.rounds import rounds
from forklora.recipes.run import is_done, read_record, record_end, record_path
from tqdm.auto import tqdm

_PAUSE = 0.2  # seconds between two looks at what is running


def check_grid(grid: Grid) -> None:
    """Raise a Refusal, with every complaint, where an arm does not fit the model, or the ranks this machine."""
    for task in grid.tasks:
        each = [grid.report(task, arm, rate=arm.rates[0], seed=grid.seeds[0]) for arm in grid.arms]
        check_recipe(each[0].model_copy(update={"arms": tuple(recipe.arms[0] for recipe in each)}))


def run_grid(grid: Grid, *, overwrite: bool = False) -> dict[str, Any]:
    """Run what is missing of a comparison into ``grid.output``, write its report, return the report's figures.

    Args:
        grid: what to compare.
        overwrite: forget the records of an earlier comparison in that folder first.
    """
    from forklora.recipes.comparison_report import write_comparison

    folder = Path(grid.output)
    if overwrite:
        for old in folder.glob("*/*/*/record.json"):
            old.unlink()
    write_json(folder / "grid.json", grid.model_dump(mode="json"))
    waiting = [Line(grid, task=task, arm=arm) for task in grid.tasks for arm in grid.arms]
    try:
        with tqdm(total=sum(line.steps for line in waiting), desc=grid.name, unit="step") as bar:
            _run_lines(waiting, beside=grid.beside, bar=bar)
    finally:
        if any(folder.glob("*/*/*/record.json")):
            write_comparison(folder)
    return write_comparison(folder)


def _run_lines(waiting: list["Line"], *, beside: int, bar: "tqdm[Any]") -> None:
    running: list[Line] = []
    with contextlib.ExitStack() as stack:
        while waiting or running:
            begun, waiting = waiting[: beside - len(running)], waiting[beside - len(running) :]
            for line in begun:
                stack.callback(line.stop)
            running += begun
            for line in running:
                line.look(bar)
            running = [line for line in running if not line.finished]
            time.sleep(_PAUSE if running else 0)


class Line:
    """One arm on one task: its rounds, one launch at a time."""

    def __init__(self, grid: Grid, *, task: GridTask, arm: GridArm) -> None:
        self.grid, self.task, self.arm = grid, task, arm
        self.rounds = rounds(grid, task=task, arm=arm)
        self.batch: list[Recipe] = []
        self.launched: set[str] = set()
        self.finished = False
        self.explained = False  # the run that ended last has recorded its own failure
        self._launch = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def steps(self) -> int:
        """Optimizer steps of all runs."""
        counts = [len(self.arm.rates), *(trial.keep for trial in self.grid.trials)]
        tried = sum(count * trial.steps for count, trial in zip(counts, self.grid.trials, strict=False))
        return tried + len(self.grid.seeds) * self.grid.steps

    def look(self, bar: "tqdm[Any]") -> None:
        """Take note of what has ended, and start what comes next."""
        self._count(bar)
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return
            self.stop()
            self._count(bar)
            self._blame(code)
            self._count(bar)
        while not self.batch and not self.finished:
            found = next(self.rounds, None)
            self.finished = found is None
            self.batch = list(found or ())
            self._count(bar)
        if self.batch:
            self._start()

    def stop(self) -> None:
        """Nothing of this line runs any more."""
        self._launch.close()
        self._process = None

    def _start(self) -> None:
        arguments = []
        for recipe in self.batch:
            record_path(recipe, self.arm).unlink(missing_ok=True)
            self.launched.add(recipe.output)
            file = Path(recipe.output) / f"{self.arm.name}.json"
            write_json(file, recipe.model_dump(mode="json"))
            arguments += [str(file), self.arm.name]
        log = Path(self.grid.output) / "logs" / f"{self.task.name}-{self.arm.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        self.explained = False
        launch = ranks_running(self.batch[0], arguments, beside=self.grid.beside, log=log)
        self._process = self._launch.enter_context(launch)

    def _count(self, bar: "tqdm[Any]") -> None:
        """Runs that have ended leave the batch: done before, or with a record of this launch."""
        for recipe in list(self.batch):
            mine = recipe.output in self.launched and record_path(recipe, self.arm).exists()
            if mine or is_done(recipe, recipe.arms[0]):
                self.explained = mine and read_record(recipe, self.arm).get("status") == "failed"
                self.batch.remove(recipe)
                bar.set_postfix_str(f"{self.task.name} {self.arm.name}", refresh=False)
                bar.update(recipe.steps)

    def _blame(self, code: int) -> None:
        """A launch has ended: unless a run has said why, it died in the first one without a record."""
        if self.batch and not self.explained:
            log = f"logs/{self.task.name}-{self.arm.name}.log"
            error = f"the run's process ended with exit code {code} and left no record; see {log}"
            record_end(self.batch[0], self.batch[0].arms[0], status="failed", error=error)
