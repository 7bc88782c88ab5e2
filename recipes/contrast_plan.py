"""What `forklora contrast` contrasts: ways to train one model on one task, optimizers, rates; read from `key=value`.

python -c "from forklora.recipes.contrast_plan import load_contrast; print(load_contrast(['steps=4']).runs)"
"""

from typing import Annotated, Any, Literal, NamedTuple, Self

from forklora.recipes.config import Recipe, resolved
from forklora.recipes.measure_plan import MeasurePlan
from forklora.recipes.options import Closed, EvaluationSpec, ModelSpec, Positive, SamplingSpec, TaskSpec
from forklora.recipes.reading import checked_options
from pydantic import BeforeValidator, Field, Strict, model_validator

Way = Literal["rl", "distill", "sft"]
_RATES: dict[str, list[float]] = {
    "rl-adamw": [3e-6, 1e-5],
    "rl-sgd": [0.1, 0.3],
    "distill-adamw": [3e-6, 1e-5],
    "distill-sgd": [0.1, 0.3],
    "sft-adamw": [3e-6, 1e-5],
    "sft-sgd": [0.03, 0.1],
}


class Run(NamedTuple):
    """One training: how, with which optimizer, at which rate."""

    way: Way
    optimizer: Literal["adamw", "sgd"]
    rate: float

    @property
    def arm(self) -> str:
        """The way with its optimizer."""
        return f"{self.way}-{self.optimizer}"

    @property
    def name(self) -> str:
        """The arm with its rate; the name of its folder."""
        return f"{self.arm}-{self.rate:g}"


def _listed(given: Any) -> Any:  # noqa: ANN401 - whatever stands behind ways=
    return given.split(",") if isinstance(given, str) else given


def _completed(given: Any) -> Any:  # noqa: ANN401 - whatever stands behind rates=
    return _RATES | given if isinstance(given, dict) else given


class ContrastPlan(Closed):
    """One contrast: full weights of one model, trained in several ways with as many prompts a step."""

    model: ModelSpec = ModelSpec(dtype="float32")
    """The model; its weights are trained in this precision."""
    task: TaskSpec = TaskSpec(name="addition", options={"low": 5, "high": 30, "shots": 3})
    """The questions of all ways."""
    ways: Annotated[tuple[Way, ...], Strict(False), Field(min_length=1), BeforeValidator(_listed)] = (
        "rl",
        "distill",
        "sft",
    )
    """Reinforcement learning; distillation of the best of it on the student's own samples; fine-tuning on answers."""
    optimizers: Annotated[
        tuple[Literal["adamw", "sgd"], ...], Strict(False), Field(min_length=1), BeforeValidator(_listed)
    ] = ("adamw", "sgd")
    """Optimizers of each way."""
    rates: Annotated[dict[str, list[float]], BeforeValidator(_completed)] = _RATES
    """Learning rates of each way and optimizer; the one with the best validation accuracy is the arm's own."""
    sampling: SamplingSpec = SamplingSpec()
    prompts: Positive = 16
    """Prompts of a step."""
    group: int = Field(8, ge=2)
    """Completions of each prompt in reinforcement learning."""
    steps: Positive = 16
    """Optimizer steps."""
    evaluation: EvaluationSpec = EvaluationSpec(every=1_000)
    """How accuracy is measured, on validation questions for the choice of a rate and on test questions."""
    forks: Positive = 64
    """Prompts whose rollouts by the base the update is held against."""
    top: Positive = 16
    """Singular values whose share of the energy is given, and directions that are compared."""
    exact: Positive = 1024
    """Matrices whose shorter side is at most this long are measured exactly."""
    seed: int = Field(0, ge=0)
    """Seed of questions and rollouts."""
    output: str = Field("runs/contrast", min_length=1)
    """Folder for one folder a run, contrast.json and the page."""

    @model_validator(mode="after")
    def _arms_have_rates_and_a_teacher(self) -> Self:
        arms = {f"{way}-{optimizer}" for way in self.ways for optimizer in self.optimizers}
        if missing := sorted(arm for arm in arms if not self.rates.get(arm)):
            raise ValueError(f"no rates for {', '.join(missing)}; give them as rates.{missing[0]}='[0.1]'")
        if unknown := sorted(set(self.rates) - set(_RATES)):
            raise ValueError(f"rates for {', '.join(unknown)}, which are no arms; those are {', '.join(_RATES)}")
        if "distill" in self.ways and ("rl" not in self.ways or "adamw" not in self.optimizers):
            raise ValueError("distill learns from the best rl-adamw run: it needs ways=rl,distill and optimizers=adamw")
        return self

    @property
    def runs(self) -> list[Run]:
        """All trainings in their order: a teacher comes before its students."""
        ways = [way for way in ("rl", "distill", "sft") if way in self.ways]
        return [
            Run(way, optimizer, rate)
            for way in ways
            for optimizer in self.optimizers
            for rate in self.rates[f"{way}-{optimizer}"]
        ]

    def recipe(self, run: Run) -> Recipe:
        """The run as a recipe whose one arm trains the model's own weights."""
        shared = ("model", "task", "sampling", "prompts", "group", "steps", "evaluation", "seed")
        given = {key: getattr(self, key) for key in shared}
        arm = {"name": run.arm, "adapter": "full", "optimizer": run.optimizer, "rate": run.rate}
        texts = {"name": "contrast", "description": "Full weights.", "target": None, "output": self.output}
        return resolved(Recipe.model_validate({**texts, **given, "arms": [arm]}))

    def measurement(self, tuned: str) -> MeasurePlan:
        """How a run's weights are measured."""
        shared = {key: getattr(self, key) for key in ("task", "sampling", "seed", "top", "exact")}
        return MeasurePlan.model_validate({"base": self.model.name, "tuned": tuned, "count": self.forks, **shared})


def load_contrast(overrides: list[str]) -> ContrastPlan:
    """The plan with overrides such as `steps=4`, `ways=rl,sft`. Raises a Refusal with every complaint."""
    return checked_options(ContrastPlan, {}, overrides=overrides, problem="this cannot be contrasted", finish=_checked)


def _checked(plan: ContrastPlan) -> ContrastPlan:
    plan.task.build()
    return plan
