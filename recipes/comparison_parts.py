"""Holds a comparison as frozen data: runs, an entry for each task with each arm, means over tasks, checks."""

from dataclasses import dataclass
from typing import Any

from forklora.recipes.intervals import Difference, WorkingRange
from forklora.recipes.summary import Record


@dataclass(frozen=True)
class Run:
    """One record of a comparison; what it lacks is None."""

    task: str
    round: str
    """`trial1`, `trial2`, ... or `report`."""
    arm: str
    rate: float | None
    seed: int | None
    status: str
    """done, failed, interrupted, or unreadable."""
    error: str | None
    accuracy_start: float | None
    accuracy_final: float | None
    seconds: float | None
    """In all, with evaluation."""
    path: str
    """Of the record, below the comparison's folder."""
    record: Record


@dataclass(frozen=True)
class Costs:
    """Medians over the seeds of an entry; None where no seed has the figure."""

    init_seconds: float | None
    training_seconds: float | None
    """Without initialization, without evaluation."""
    peak_mib: float | None
    adapter_bytes: float | None
    kl: float | None
    """Nats per token to the base model."""
    text_loss: float | None
    """Nats per token on ordinary text, after less before."""
    untrained: float | None
    """Accuracy on a task that was not trained, after less before."""
    changed_share: float | None
    stable_rank: float | None
    top16_energy: float | None
    norm: float | None


@dataclass(frozen=True)
class Entry:
    """What one arm did on one task, by its reported runs that are done and by its first round of trials."""

    task: str
    arm: str
    adapter: str
    """Such as "LoRA, rank 1"."""
    optimizer: str
    """Such as "AdamW 0.003"."""
    rate: float | None
    """The chosen one, which is that of the reported runs; None where nothing is reported."""
    trained: int | None
    """Trained numbers."""
    starts: dict[int, float]
    """Accuracy before the first step, by seed."""
    finals: dict[int, float]
    """Accuracy after the last step, by seed."""
    start: float | None
    """Median over seeds, as is `final`."""
    final: float | None
    difference: Difference
    """Final accuracy less the baseline's, paired by seed."""
    gain: Difference
    """Final accuracy less the start, paired by seed."""
    steps_to_target: float | None
    """Median over seeds, where a seed that never gets there counts as infinity; so are the next two."""
    rollouts_to_target: float | None
    seconds_to_target: float | None
    pass_at: dict[int, float]
    """Median over seeds, by k."""
    costs: Costs
    trial1: dict[float, float | None]
    """Validation accuracy of each rate at the end of the first round; None is a run that is not done."""
    trial_start: float | None
    """Validation accuracy before the first step."""
    working: WorkingRange | None
    at_end: bool
    """The chosen rate is the smallest or the largest of the grid."""
    curves: dict[int, tuple[tuple[float, float, float], ...]]
    """(rollouts, steps, accuracy) of each evaluation, by seed."""
    failures: tuple[str, ...]
    """A line for each run of any round that is not done."""


@dataclass(frozen=True)
class Overall:
    """An arm over all tasks, by the seeds that are done on every one of them."""

    arm: str
    adapter: str
    finals: dict[int, float]
    """Mean over tasks, by seed."""
    start: float | None
    """Median over seeds of the mean over tasks, as is `final`."""
    final: float | None
    difference: Difference
    """Means over tasks less the baseline's, paired by seed."""
    rollouts_to_target: float | None
    """Mean over the tasks that have a target; None where one is not reached."""


@dataclass(frozen=True)
class RandomReward:
    """Whether an arm that learns from coins seems to learn."""

    task: str
    arm: str
    over_baseline: Difference
    over_start: Difference
    wins: bool
    """One of both intervals lies above zero, which it must not."""


@dataclass(frozen=True)
class Checks:
    """What has to hold for the comparison to mean something."""

    step0: dict[str, dict[str, tuple[str, ...]]]
    """Task -> hash of the logits before the first step -> arms that start there."""
    base: dict[str, tuple[str, ...]]
    """Hash of the base weights -> arms."""
    random_reward: tuple[RandomReward, ...]
    rates: dict[str, int]
    """Arm -> different rates in the grid."""
    missing: tuple[str, ...]
    """A line for each task with an arm that lacks reported seeds."""
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Everything that a report says, read from a folder."""

    grid: dict[str, Any]
    runs: tuple[Run, ...]
    """Of the grid's tasks and arms: in their order, by round, rate, seed."""
    entries: tuple[Entry, ...]
    """Task by task, arms in the grid's order."""
    overall: tuple[Overall, ...]
    """Arms in the grid's order; empty where there is one task."""
    checks: Checks
    failures: tuple[str, ...]
    """A line for each run that failed or cannot be read, and for those that are missing."""
