"""What `forklora measure` measures: a model before and after, and the forks that the update is held against.

python -c "from forklora.recipes.measure_plan import load_measure; print(load_measure('a', 'b', task='addition'))"
"""

from pathlib import Path
from typing import Any, Self

from forklora.recipes.options import Closed, Positive, SamplingSpec, TaskSpec
from forklora.recipes.reading import checked_options
from forklora.recipes.refusal import Refusal
from forklora.recipes.subject import Subject
from pydantic import Field, model_validator


class MeasurePlan(Closed):
    """One update, and what it is measured with."""

    base: str = Field(min_length=1)
    """The model before: the demo model `smollm2-135m`, a folder, or a hub id."""
    tuned: str = Field(min_length=1)
    """The model after: a folder, a hub id, or a folder with a PEFT adapter of the base."""
    top: Positive = 16
    """Singular values whose share of the energy is given, and directions that are compared."""
    exact: Positive = 1024
    """Matrices whose shorter side is at most this long are measured exactly, larger ones by a randomized SVD."""
    task: TaskSpec | None = None
    """Task whose forks the update is held against; null is none."""
    trace: str | None = Field(None, min_length=1)
    """File of rollouts of the base, as `forklora forks` writes it, whose forks the update is held against."""
    count: Positive = 64
    """Prompts of the task that are completed."""
    group: int = Field(8, ge=2)
    """Completions of each."""
    sampling: SamplingSpec = SamplingSpec()
    seed: int = Field(0, ge=0)
    """Seed of the questions, the completions, the random directions and the randomized SVD."""

    @model_validator(mode="after")
    def _forks_have_one_source(self) -> Self:
        if self.task is not None and self.trace is not None:
            raise ValueError("forks come from a task or from a trace; give one of the two, `task` or `trace`")
        return self

    @property
    def subject(self) -> Subject:
        """The base with the task's prompts."""
        asked = {key: getattr(self, key) for key in ("task", "count", "group", "sampling", "seed")}
        return Subject.model_validate({"model": {"name": self.base}, **asked})


def load_measure(
    base: str, tuned: str, *, task: str | None = None, trace: str | None = None, overrides: list[str] | None = None
) -> MeasurePlan:
    """The plan of a command, with overrides such as `top=8`, `count=32`.

    Raises:
        Refusal: with every complaint; or there is no such file of rollouts.
    """
    data: dict[str, Any] = {"base": base, "tuned": tuned, "trace": trace}
    data |= {"task": {"name": task}} if task is not None else {}
    problem = "this cannot be measured"
    plan = checked_options(MeasurePlan, data, overrides=overrides or [], problem=problem, finish=_with_its_task)
    if plan.trace is not None and not Path(plan.trace).is_file():
        raise Refusal(f"there is no file of rollouts {plan.trace}; `forklora forks` writes one, trace.safetensors")
    return plan


def _with_its_task(plan: MeasurePlan) -> MeasurePlan:
    if plan.task is not None:
        plan.task.build()
    return plan
