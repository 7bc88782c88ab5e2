"""A closed, typed recipe: YAML and `key=value` overrides in, one frozen object out, or a readable refusal.

Unknown keys, wrong types and impossible combinations are refused here, before any model is loaded. Each option is
described once, in the string under its field: errors and help texts are made from it (wording.py).

    python -c "from forklora.recipes.config import load_recipe; print(load_recipe('quickstart', ['steps=3']))"
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Self, TypeVar

from forklora.recipes.options import (
    Arm,
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
from forklora.recipes.reading import checked_options, find_shipped, read_yaml
from forklora.recipes.zero import deepspeed_settings
from pydantic import Field, Strict, field_validator, model_validator

_SHIPPED = Path(__file__).parent
_Options = TypeVar("_Options", bound=Closed)


class Recipe(Closed):
    """One run: a model, a task, and one or more adapters that learn it from the same rollout budget."""

    name: str
    """Short name of the recipe."""
    description: str
    """What the recipe shows, in a sentence."""
    model: ModelSpec = ModelSpec()
    task: TaskSpec
    sampling: SamplingSpec = SamplingSpec()
    prompts: Positive = 16
    """Prompts of one step."""
    group: int = Field(8, ge=2)
    """Completions of each prompt; a step has prompts x group rollouts."""
    steps: int = Field(15, ge=0)
    """Optimizer steps of each arm."""
    target: float | None = Field(0.8, gt=0, le=1)
    """Held-out accuracy whose first crossing is reported; null reports none."""
    evaluation: EvaluationSpec = EvaluationSpec()
    forks: ForkSpec = ForkSpec()
    outcome: OutcomeSpec | None = None
    """What else is measured at the end; null measures nothing else."""
    part: PartSpec | None = None
    """The place of this run in a comparison; null is none."""
    arms: Annotated[tuple[Arm, ...], Field(min_length=1), Strict(False)]
    """The adapters to train, one after the other."""
    ranks: Positive = 1
    """Processes that train an arm together; each takes its share of a step's prompts, which stays the same step."""
    deepspeed: str | None = Field(None, min_length=1)
    """Under DeepSpeed: zero0, zero1, zero2, zero3, zero2_offload, zero3_offload or a JSON file; null is without."""
    seed: int = Field(0, ge=0)
    """Seed of the prompts, the rollouts and the adapters, the same for every arm."""
    output: str = Field("runs/quickstart", min_length=1)
    """Folder for the report and one folder per arm."""

    @field_validator("deepspeed")
    @classmethod
    def _leaves_the_arms_alone(cls, value: str | None) -> str | None:
        deepspeed_settings(value)
        return value

    @model_validator(mode="after")
    def _groups_stay_whole(self) -> Self:
        if self.prompts % self.ranks:
            raise ValueError(
                f"prompts = {self.prompts} cannot be shared evenly by ranks = {self.ranks}: every rank takes whole "
                f"groups; set prompts to a multiple of {self.ranks}, or ranks to a divisor of {self.prompts}"
            )
        return self

    @model_validator(mode="after")
    def _arms_differ(self) -> Self:
        names = [arm.name for arm in self.arms]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"arms need different names; used more than once: {', '.join(repeated)}")
        return self


def recipe_paths() -> dict[str, Path]:
    """Name and path of every recipe that comes with the package."""
    return {path.stem: path for path in sorted(_SHIPPED.glob("*.yaml"))}


def find_recipe(path_or_name: str | Path) -> Path:
    """The recipe file meant: a path, or the name of a shipped recipe. Raises RecipeError, naming the nearest one."""
    return find_shipped(path_or_name, recipe_paths(), what="recipe")


def load_recipe(path_or_name: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Reads a recipe, applies overrides and checks everything that can be checked without a model.

    Args:
        path_or_name: a YAML file, or the name of a shipped recipe.
        overrides: `key=value` strings; keys are dotted, an arm is named by its place or its name
            (`steps=3`, `evaluation.prompts=32`, `arms.0.rate=1e-3`, `arms.block.rate=0.1`).

    Returns:
        The recipe with everything resolved: `sampling.max_new_tokens`, `sampling.stop` and `alpha` are never null.

    Raises:
        RecipeError: with every complaint, the nearest known name for each unknown one, and what is allowed.
    """
    return load_options(Recipe, find_recipe(path_or_name), overrides=overrides or [], finish=resolved)


def load_options(
    group: type[_Options], path: Path, *, overrides: list[str], finish: Callable[[_Options], _Options]
) -> _Options:
    """A YAML file with overrides as an object of a group of options, finished.

    Raises:
        RecipeError: with every complaint of the group, or that of the task in ``finish``.
    """
    problem = f"the recipe {path} cannot be used"
    return checked_options(group, read_yaml(path), overrides=overrides, problem=problem, finish=finish)


def resolved(recipe: Recipe) -> Recipe:
    """The recipe with what it leaves to the task and to the rank filled in."""
    asked, given = recipe.task.build(), recipe.sampling
    length = asked.max_new_tokens if given.max_new_tokens is None else given.max_new_tokens
    stop = list(asked.stop) if given.stop is None else given.stop
    arms = tuple(
        arm.model_copy(update={"alpha": float(arm.rank) if arm.alpha is None else arm.alpha}) for arm in recipe.arms
    )
    sampling = given.model_copy(update={"max_new_tokens": length, "stop": stop})
    return recipe.model_copy(update={"sampling": sampling, "arms": arms})
