"""A model with prompts to look at: what the verbs that measure are given, checked before any weight is read.

Prompts come from a task, whose completions can be scored, or from a file: text with a prompt in each line, or JSON
lines, whose `prompt` is a string or a list of chat messages.

    python -c "from forklora.recipes.subject import Subject; print(Subject(task={'name': 'addition'}))"
"""

import json
from pathlib import Path
from typing import Any, Self, TypeVar

from forklora.recipes.options import Closed, ModelSpec, Positive, SamplingSpec, TaskSpec
from forklora.recipes.reading import checked_options
from forklora.recipes.refusal import Refusal
from pydantic import Field, model_validator


class Subject(Closed):
    """A model, and the prompts it is looked at with."""

    model: ModelSpec = ModelSpec()
    task: TaskSpec | None = None
    """Task whose questions are the prompts; null takes them from a file."""
    prompts: str | None = Field(None, min_length=1)
    """File of prompts, one in each line: text, or JSON with a key `prompt`; null takes them from the task."""
    count: Positive = 64
    """Prompts that are completed, at most."""
    group: Positive = 4
    """Completions of each."""
    sampling: SamplingSpec = SamplingSpec()
    seed: int = Field(0, ge=0)
    """Seed of the questions and of the completions."""

    @model_validator(mode="after")
    def _asks_something(self) -> Self:
        if (self.task is None) == (self.prompts is None):
            raise ValueError("prompts come from a task or from a file; give one of the two, `task` or `prompts`")
        return self


Asked = TypeVar("Asked", bound=Subject)


class ForkSubject(Subject):
    """A model with prompts whose forks are looked at."""

    mass: float = Field(0.98, gt=0, le=1)
    """Probability that a candidate set holds, unless it reaches its cap."""
    cap: Positive = 8
    """Most candidates at a position."""


class FisherSubject(Subject):
    """A model with a task whose Fisher is summed up."""

    group: int = Field(4, ge=2)
    """Completions of each, whose rewards are held against each other."""
    share: float = Field(0.01, gt=0, le=1)
    """Share of the coordinates that count as the largest."""
    factored: int = Field(8, ge=0)
    """Layers, evenly chosen, whose K-FAC cap is checked."""

    @model_validator(mode="after")
    def _has_rewards(self) -> Self:
        if self.task is None or self.count < 2:  # noqa: PLR2004 - two halves
            raise ValueError("the gradient needs rewards and two halves of the prompts: give a task, and a count of 2")
        return self


def load_subject(
    group: type[Asked], model: str, *, overrides: list[str], task: str | None = None, prompts: str | None = None
) -> Asked:
    """The subject that a command names, with overrides such as `count=16`, `sampling.temperature=0.7`.

    Raises:
        Refusal: with every complaint.
    """
    data: dict[str, Any] = {"model": {"name": model}}
    data |= {"task": {"name": task}} if task is not None else {}
    data |= {"prompts": prompts} if prompts is not None else {}
    problem = "this cannot be looked at"
    return checked_options(group, data, overrides=overrides, problem=problem, finish=_readable)


def _readable(subject: Asked) -> Asked:
    """The subject, whose task exists, or whose file holds prompts."""
    if subject.task is not None:
        subject.task.build()
    else:
        read_prompts(Path(str(subject.prompts)))
    return subject


def read_prompts(path: Path) -> list[str | list[dict[str, str]]]:
    """The prompts of a file, empty lines left out.

    Raises:
        Refusal: the file cannot be read, holds no prompt, or a line of JSON lines is no object with a `prompt`.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(f"cannot read the prompts {path}: {error}") from error
    if not lines:
        raise Refusal(f"the file {path} holds no prompt; write one in each line")
    if path.suffix not in (".jsonl", ".json"):
        return list(lines)
    return [_prompt_of(line, f"line {i} of {path}") for i, line in enumerate(lines, 1)]


def _prompt_of(line: str, source: str) -> str | list[dict[str, str]]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise Refusal(f"{source} is no JSON: {error}") from error
    prompt = entry.get("prompt") if isinstance(entry, dict) else None
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(isinstance(turn, dict) for turn in prompt):
        return prompt
    raise Refusal(f'{source} has no prompt; write {{"prompt": "..."}}, or a list of chat messages in its place')
