"""A closed, typed comparison: YAML and overrides in, one frozen object out that knows the recipe of each of its runs.

Decisions: every arm gets as many rates as every other, and the same rounds of trials to choose one by; rates are chosen
on validation questions with a seed of their own, results come from test questions with the seeds that are listed; all
else (model, questions, their order, rollouts, sampler, engine) is the same for all arms.

    python -c "from forklora.recipes.grid import load_grid; print(load_grid('quick', ['seeds=[0, 1]']))"
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Self

from forklora.recipes.config import Recipe, load_options, resolved
from forklora.recipes.options import (
    Arm,
    ArmSpec,
    Closed,
    EvaluationSpec,
    ForkSpec,
    ModelSpec,
    OutcomeSpec,
    PartSpec,
    Positive,
    SamplingSpec,
    TaskSpec,
)
from forklora.recipes.reading import find_shipped
from forklora.recipes.wording import nearest
from pydantic import Field, Strict, model_validator

_SHIPPED = Path(__file__).parent / "grids"
REPORT = "report"
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class GridTask(Closed):
    """One of the tasks of a comparison."""

    name: _Name
    """Its name in tables, and of its folder."""
    task: TaskSpec
    target: float | None = Field(None, gt=0, le=1)
    """Held-out accuracy whose first crossing is reported; null reports none."""
    untrained: TaskSpec | None = None
    """A task that is not trained on, for what is forgotten; null asks none."""


class GridArm(ArmSpec):
    """One adapter with its optimizer, and the rates it may choose from."""

    rates: Annotated[tuple[Rate, ...], Field(min_length=1), Strict(False)]
    """Learning rates, or lengths of a step; every arm has as many."""


class Trial(Closed):
    """A round in which rates are tried."""

    steps: Positive
    """Optimizer steps of each rate."""
    keep: Positive
    """So many of the rates go on, those with the best validation accuracy at the end."""


class Grid(Closed):
    """A comparison: tasks x arms, a rate chosen for each of both, and results over seeds."""

    name: _Name
    """Short name of the comparison."""
    description: str
    """What it asks, in a sentence."""
    model: ModelSpec = ModelSpec()
    tasks: Annotated[tuple[GridTask, ...], Field(min_length=1), Strict(False)]
    """What is learned."""
    sampling: SamplingSpec = SamplingSpec()
    prompts: Positive = 16
    """Prompts of one step."""
    group: int = Field(8, ge=2)
    """Completions of each prompt; a step has prompts x group rollouts."""
    trials: Annotated[tuple[Trial, ...], Field(min_length=1), Strict(False)]
    """Rounds of successive halving, the same for every arm; the last keeps one rate."""
    trial_seed: int = Field(1000, ge=0)
    """Seed of all trials."""
    choosing: EvaluationSpec = EvaluationSpec()
    """How trials are judged, on validation questions; they are asked before the first step and after the last."""
    steps: Positive = 16
    """Optimizer steps of the runs that are reported."""
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1), Strict(False)]
    """Seeds of the runs that are reported."""
    evaluation: EvaluationSpec = EvaluationSpec(split="test")
    """How the runs that are reported are judged, on test questions."""
    outcome: OutcomeSpec = OutcomeSpec()
    forks: ForkSpec = ForkSpec()
    """Where bases come from; their seed is the run's own, where an arm does not state another."""
    arms: Annotated[tuple[GridArm, ...], Field(min_length=1), Strict(False)]
    """What is compared."""
    baseline: str
    """Name of the arm that all others are held against."""
    deepspeed: str | None = Field(None, min_length=1)
    """Under DeepSpeed: zero0, zero1, zero2, zero3, zero2_offload, zero3_offload or a JSON file; null is without."""
    ranks: Positive = 1
    """Processes that train an arm together."""
    beside: Positive = 1
    """Runs that go on side by side on this machine."""
    output: str = Field("runs/comparison", min_length=1)
    """Folder for the records and the report."""

    @model_validator(mode="after")
    def _names_are_found(self) -> Self:
        for what, names in (("tasks", [t.name for t in self.tasks]), ("arms", [a.name for a in self.arms])):
            if repeated := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"{what} need different names; used more than once: {', '.join(repeated)}")
        names = [arm.name for arm in self.arms]
        if self.baseline not in names:
            raise ValueError(f"baseline {self.baseline!r} is no arm{nearest(self.baseline, names)}: {', '.join(names)}")
        return self

    @model_validator(mode="after")
    def _all_choose_alike(self) -> Self:
        counts = {arm.name: len(set(arm.rates)) for arm in self.arms}
        if len(set(counts.values())) > 1:
            said = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise ValueError(f"every arm needs as many different rates as every other; there are: {said}")
        kept = [next(iter(counts.values())), *(trial.keep for trial in self.trials)]
        if kept[-1] != 1 or any(later > earlier for earlier, later in zip(kept, kept[1:], strict=False)):
            raise ValueError(
                f"trials keep {kept[1:]} of {kept[0]} rates: each round can keep at most what it got, the last one 1"
            )
        if self.trial_seed in self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(
                f"seeds {list(self.seeds)} must differ from each other and from trial_seed {self.trial_seed}: the "
                "runs that a rate was chosen by are not the runs it is reported by"
            )
        return self

    def trial(self, task: GridTask, arm: GridArm, *, rate: float, round_: int) -> Recipe:
        """The recipe that tries a rate in one of the rounds, counted from 0."""
        steps = self.trials[round_].steps
        judged = self.choosing.model_copy(update={"every": steps, "split": "validation"})
        return self._recipe(task, arm, rate, seed=self.trial_seed, part=f"trial{round_ + 1}", rest=(steps, judged))

    def report(self, task: GridTask, arm: GridArm, *, rate: float, seed: int) -> Recipe:
        """The recipe of a run that is reported."""
        judged = self.evaluation.model_copy(update={"split": "test"})
        return self._recipe(task, arm, rate, seed=seed, part=REPORT, rest=(self.steps, judged))

    def _recipe(
        self, task: GridTask, arm: GridArm, rate: float, *, seed: int, part: str, rest: tuple[int, EvaluationSpec]
    ) -> Recipe:
        steps, evaluation = rest
        whole = arm.model_dump(exclude={"rates"}) | {"rate": rate}
        kept = self.forks.kept_in or str(Path(self.output) / "bases")
        if arm.forks is not None:
            own = {} if "seed" in arm.forks.model_fields_set else {"seed": seed}
            whole["forks"] |= {"kept_in": kept, **own}
        outcome = self.outcome.model_copy(update={"untrained": task.untrained})
        recipe = Recipe(
            name=self.name,
            description=self.description,
            model=self.model,
            task=task.task,
            sampling=self.sampling,
            prompts=self.prompts,
            group=self.group,
            steps=steps,
            target=task.target,
            evaluation=evaluation,
            forks=self.forks.model_copy(update={"seed": seed, "kept_in": kept}),
            outcome=outcome if part == REPORT else None,
            part=PartSpec(grid=self.name, task=task.name, round=part),
            arms=(Arm.model_validate(whole),),
            ranks=self.ranks,
            deepspeed=self.deepspeed,
            seed=seed,
            output=str(Path(self.output) / task.name / f"{part}-s{seed}-{rate:g}"),
        )
        return resolved(recipe)

    def first_recipes(self) -> Iterator[Recipe]:
        """One recipe for each task and arm, to check them by."""
        for task in self.tasks:
            for arm in self.arms:
                yield self.report(task, arm, rate=arm.rates[0], seed=self.seeds[0])


def grid_paths() -> dict[str, Path]:
    """Name and path of every comparison that comes with the package."""
    return {path.stem: path for path in sorted(_SHIPPED.glob("*.yaml"))}


def find_grid(path_or_name: str | Path) -> Path:
    """The file meant: a path, or the name of a shipped comparison. Raises RecipeError, naming the nearest one."""
    return find_shipped(path_or_name, grid_paths(), what="comparison")


def load_grid(path_or_name: str | Path, overrides: list[str] | None = None) -> Grid:
    """Reads a comparison, applies overrides and checks everything that can be checked without a model.

    Args:
        path_or_name: a YAML file, or the name of a shipped comparison.
        overrides: `key=value` strings; keys are dotted, arms and tasks are named by their place or their name
            (`seeds=[0, 1]`, `arms.span.rates=[0.03, 0.1]`).

    Raises:
        RecipeError: with every complaint, the nearest known name for each unknown one, and what is allowed.
    """

    def finish(grid: Grid) -> Grid:
        for _ in grid.first_recipes():  # each resolves its task
            pass
        return grid

    return load_options(Grid, find_grid(path_or_name), overrides=overrides or [], finish=finish)
