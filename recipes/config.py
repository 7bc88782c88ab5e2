"""A closed, typed recipe: YAML and `key=value` overrides in, one frozen object out, or a readable refusal.

Unknown keys, wrong types and impossible combinations are refused here, before any model is loaded. Each option is
described once, in the string under its field: errors and help texts are made from it (wording.py).

    python -c "from forklora.recipes.config import load_recipe; print(load_recipe('quickstart', ['steps=3']))"
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from forklora.recipes.reading import RecipeError, parsed_override, put, read_yaml
from forklora.recipes.tasks import Task, TaskError, task
from forklora.recipes.wording import complaint, nearest
from forklora.recipes.zero import deepspeed_settings
from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError, field_validator, model_validator

_SHIPPED = Path(__file__).parent
_MOST_COMPLAINTS = 12
Positive = Annotated[int, Field(ge=1)]


class Closed(BaseModel):
    """A group of options: no other keys, no silent conversion, no later change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class ModelSpec(Closed):
    """Which model is trained."""

    name: str = "smollm2-135m"
    """The demo model `smollm2-135m`, a folder, or a Hugging Face hub id."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Precision of the frozen weights."""


class TaskSpec(Closed):
    """Which questions are asked."""

    name: str
    """Name of the task, such as `multiplication` or `reasoning_gym`."""
    options: dict[str, Any] = {}
    """The task's own options."""

    def build(self) -> Task:
        """The task itself. Raises TaskError where name or options do not exist."""
        return task(self.name, **self.options)


class SamplingSpec(Closed):
    """How completions are drawn."""

    max_new_tokens: Positive | None = None
    """Longest completion in tokens; null takes what the task states."""
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Divides the logits before sampling."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with this much probability; 1 is all of them."""
    top_k: int = Field(0, ge=0)
    """Sample from this many likeliest tokens; 0 is all of them."""
    min_p: float | None = Field(None, ge=0, lt=1)
    """Drop tokens less likely than this share of the likeliest; null drops none."""
    stop: list[str] | None = None
    """Strings that end a completion; null takes what the task states."""


class EvaluationSpec(Closed):
    """How held-out accuracy is measured."""

    every: Positive = 2
    """Steps between two evaluations; the first and the last step are always evaluated."""
    prompts: Positive = 128
    """Held-out prompts."""
    samples: Positive = 4
    """Completions of each."""


class ForkSpec(Closed):
    """Where the bases of the fork adapters come from."""

    prompts: Positive = 64
    """Training prompts whose rollouts, without any reward, the bases are read from."""
    seed: int = 0
    """Seed of those prompts, of their rollouts and of the pseudo-advantages."""


class Arm(Closed):
    """One adapter with its optimizer; the arms of a recipe share everything else."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name in tables, and of the arm's folder."""
    adapter: Literal["lora", "span", "core", "inputs", "block"]
    """Plain LoRA, or the kind of fork adapter."""
    rank: Positive = 1
    """Rank of the update; for `block`, the number of input directions."""
    width: Positive | None = None
    """Output directions of `core` and `block`; null lets the adapter choose."""
    alpha: float | None = Field(None, gt=0, allow_inf_nan=False)
    """The update is scaled by alpha / rank; null means alpha = rank, a scale of one."""
    optimizer: Literal["adamw", "sgd", "length"] = "length"
    """`length` is SGD whose every step moves the weights by the Frobenius length `rate`."""
    rate: float = Field(gt=0, allow_inf_nan=False)
    """Learning rate, or the length of a step."""
    evenly: bool = True
    """For `length`: every matrix moves by the same share of it; false lets each move as its gradient says."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate goes over the steps: it stays, or falls to zero at the last one."""
    centering: Literal["none", "sampler", "value"] = "sampler"
    """What is subtracted from the score (`sampler`) or from the signal (`value`)."""
    train_basis: bool = False
    """Also train the basis: the forks are then only its starting point."""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """`all-linear`, or a list of the names of the layers that get an adapter."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.width is not None and self.adapter not in ("core", "block"):
            raise ValueError(f"width is for the adapters core and block; {self.adapter!r} has none")
        if self.train_basis and self.adapter == "lora":
            raise ValueError("train_basis is for fork adapters; 'lora' has no basis")
        return self


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
    path, shipped = Path(path_or_name), recipe_paths()
    if path.is_file():
        return path
    if str(path_or_name) in shipped:
        return shipped[str(path_or_name)]
    raise RecipeError(
        f"there is no recipe {str(path_or_name)!r}{nearest(path.stem, list(shipped))}; give the path of a YAML file, "
        f"or one of: {', '.join(shipped)}"
    )


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
    path = find_recipe(path_or_name)
    data = read_yaml(path)
    for override in overrides or []:
        parts, value = parsed_override(override)
        put(data, parts, value=value)
    try:
        return _resolved(Recipe.model_validate(data))
    except ValidationError as error:
        complaints = list(dict.fromkeys(complaint(Recipe, one) for one in error.errors()))
    except TaskError as error:
        complaints = [f"task: {error}"]
    more = len(complaints) - _MOST_COMPLAINTS
    lines = complaints[:_MOST_COMPLAINTS] + ([f"and {more} more"] if more > 0 else [])
    raise RecipeError(f"the recipe {path} cannot be used:\n" + "\n".join(f"  {line}" for line in lines))


def _resolved(recipe: Recipe) -> Recipe:
    """The recipe with what it leaves to the task and to the rank filled in."""
    asked, given = recipe.task.build(), recipe.sampling
    length = asked.max_new_tokens if given.max_new_tokens is None else given.max_new_tokens
    stop = list(asked.stop) if given.stop is None else given.stop
    arms = tuple(
        arm.model_copy(update={"alpha": float(arm.rank) if arm.alpha is None else arm.alpha}) for arm in recipe.arms
    )
    sampling = given.model_copy(update={"max_new_tokens": length, "stop": stop})
    return recipe.model_copy(update={"sampling": sampling, "arms": arms})
