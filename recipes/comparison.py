"""Reads the records of a comparison into everything that its report says.

Decisions: only runs that the comparison in ``grid.json`` has are read, so that records left from another set of rates
do not mix in; accuracy at the end is that of the outcome, which asks more completions, where a record has one; what a
record lacks stays missing; the order of files does not matter.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from forklora.recipes.comparison_labels import adapter_label, optimizer_label
from forklora.recipes.comparison_parts import Checks, Comparison, Costs, Entry, Overall, RandomReward, Run
from forklora.recipes.comparison_records import DONE, MISSING, read_run
from forklora.recipes.grid import REPORT, Grid, GridArm, GridTask
from forklora.recipes.intervals import Difference, median, paired, shown, working_range
from forklora.recipes.refusal import Refusal
from forklora.recipes.rounds import runs_of
from forklora.recipes.summary import Record, number
from pydantic import ValidationError

_MIB = 2**20
_CURVE = ("rollouts", "step", "eval_reward")
_UNKNOWN = "not recorded"


def read_comparison(folder: Path) -> Comparison:
    """The comparison whose ``grid.json`` and records lie in a folder.

    Raises:
        Refusal: there is no grid.json that can be read, or no record at all.
    """
    file = folder / "grid.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        grid = Grid.model_validate(content | {"output": str(folder)}, strict=False)
    except (OSError, ValueError, TypeError, ValidationError) as error:
        raise Refusal(
            f"{folder} holds no comparison: {file.name} cannot be read ({str(error).splitlines()[0]}); give the folder "
            "that `forklora compare` wrote to"
        ) from error
    runs = tuple(read_run(recipe, folder=folder) for recipe in runs_of(grid))
    if all(run.status == MISSING for run in runs):
        raise Refusal(f"{folder} holds no record of the comparison {grid.name!r}: run `forklora compare` first")
    entries = tuple(_entry(grid, task, arm, runs=runs) for task in grid.tasks for arm in grid.arms)
    failures = tuple(line for entry in entries for line in entry.failures)
    checks = _checks(grid, runs, entries)
    return Comparison(content, runs, entries, _overall(grid, entries), checks, (*failures, *checks.missing))


def _entry(grid: Grid, task: GridTask, arm: GridArm, *, runs: Sequence[Run]) -> Entry:
    mine = [run for run in runs if (run.task, run.arm) == (task.name, arm.name)]
    reported = [run for run in mine if run.round == REPORT]
    done = [run for run in reported if run.status == DONE]
    rate = reported[0].rate if reported else None
    begun = [run for run in mine if run.round == "trial1" and run.status != MISSING]
    tried = {run.rate: run for run in begun if run.rate is not None}
    trial1 = {r: run.accuracy_final if run.status == DONE else None for r, run in tried.items()}
    trial_start = median([run.accuracy_start for run in tried.values() if run.accuracy_start is not None])
    finals, starts = _finals(done), {run.seed: run.accuracy_start for run in done if run.accuracy_start is not None}
    bases = [run for run in runs if (run.task, run.arm, run.round) == (task.name, grid.baseline, REPORT)]
    baseline = _finals([run for run in bases if run.status == DONE])
    each = arm.model_dump(mode="json")
    return Entry(
        task=task.name,
        arm=arm.name,
        adapter=adapter_label(each),
        optimizer=optimizer_label(each, rate),
        rate=rate,
        trained=next(iter(_known(run.record.get("trained_parameters") for run in done)), None),
        starts=starts,
        finals=finals,
        start=median(list(starts.values())),
        final=median(list(finals.values())),
        difference=paired(finals, baseline),
        gain=paired(finals, starts),
        steps_to_target=_reached(reported, "steps_to_target"),
        rollouts_to_target=_reached(reported, "rollouts_to_target"),
        seconds_to_target=_reached(reported, "seconds_to_target"),
        pass_at=_pass_at(done),
        costs=_costs(done),
        trial1=trial1,
        trial_start=trial_start,
        working=None if trial_start is None else working_range(trial_start, trial1),
        at_end=rate is not None and rate in (min(arm.rates), max(arm.rates)),
        curves={run.seed: _curve(run.record) for run in done if run.seed is not None},
        failures=tuple(_line(run) for run in mine if run.status not in (DONE, MISSING)),
    )


def _line(run: Run) -> str:
    return f"{run.task} {run.arm}, {run.round}, rate {run.rate:g}, seed {run.seed}: {run.status}: {run.error}"


def _finals(done: Iterable[Run]) -> dict[int, float]:
    """Accuracy at the end by seed."""
    found = {run.seed: _outcome(run.record, "accuracy", run.accuracy_final) for run in done if run.seed is not None}
    return {seed: value for seed, value in found.items() if value is not None}


def _outcome(record: Record, key: str, otherwise: float | None = None) -> float | None:
    found = number((record.get("outcome") or {}).get(key))
    return otherwise if found is None else found


def _reached(reported: Sequence[Run], key: str) -> float | None:
    """Median over seeds; a run that failed has not got there."""
    return median([number(run.record.get(key)) for run in reported if run.status in ("done", "failed")])


def _known(values: Iterable[object]) -> list[float]:
    return [found for value in values if (found := number(value)) is not None]


def _pass_at(done: Sequence[Run]) -> dict[int, float]:
    each = [(run.record.get("outcome") or {}).get("pass_at") or {} for run in done]
    ks = sorted({int(k) for shares in each for k in shares})
    found = {k: median(_known(shares.get(str(k)) for shares in each)) for k in ks}
    return {k: share for k, share in found.items() if share is not None}


def _costs(done: Sequence[Run]) -> Costs:
    def over(read: Callable[[Record], float | None]) -> float | None:
        found = [value for run in done if (value := read(run.record)) is not None]
        return median(found) if found else None

    def less(after: str, before: str) -> Callable[[Record], float | None]:
        def read(record: Record) -> float | None:
            pair = _outcome(record, after), _outcome(record, before)
            return None if pair[0] is None or pair[1] is None else pair[0] - pair[1]

        return read

    def moved(key: str) -> Callable[[Record], float | None]:
        return lambda record: number(((record.get("outcome") or {}).get("update") or {}).get(key))

    def trained(record: Record) -> float | None:
        last = max(_known(point.get("seconds") for point in record.get("curve") or []), default=None)
        first = number(record.get("init_seconds"))
        return None if last is None or first is None else last - first

    peak = over(lambda record: number(record.get("peak_memory_bytes")))
    return Costs(
        init_seconds=over(lambda record: number(record.get("init_seconds"))),
        training_seconds=over(trained),
        peak_mib=None if peak is None else peak / _MIB,
        adapter_bytes=over(lambda record: number(record.get("adapter_bytes"))),
        kl=over(lambda record: _outcome(record, "kl_to_base")),
        text_loss=over(less("text_loss", "text_loss_base")),
        untrained=over(less("untrained", "untrained_base")),
        changed_share=over(moved("changed_share")),
        stable_rank=over(moved("stable_rank")),
        top16_energy=over(moved("top16_energy")),
        norm=over(moved("norm")),
    )


def _curve(record: Record) -> tuple[tuple[float, float, float], ...]:
    return tuple(
        (place[0], place[1], place[2])
        for point in record.get("curve") or []
        if len(place := _known(point.get(key) for key in _CURVE)) == len(_CURVE)
    )


def _overall(grid: Grid, entries: Sequence[Entry]) -> tuple[Overall, ...]:
    if len(grid.tasks) < 2:
        return ()
    means, starts = {}, {}
    for arm in grid.arms:
        mine = [entry for entry in entries if entry.arm == arm.name]
        seeds = set.intersection(*(set(entry.finals) & set(entry.starts) for entry in mine))
        means[arm.name] = {seed: fmean(entry.finals[seed] for entry in mine) for seed in sorted(seeds)}
        starts[arm.name] = [fmean(entry.starts[seed] for entry in mine) for seed in sorted(seeds)]
    return tuple(
        Overall(
            arm=arm.name,
            adapter=adapter_label(arm.model_dump(mode="json")),
            finals=means[arm.name],
            start=median(starts[arm.name]),
            final=median(list(means[arm.name].values())),
            difference=paired(means[arm.name], means[grid.baseline]),
            rollouts_to_target=_mean_rollouts(arm.name, grid, entries),
        )
        for arm in grid.arms
    )


def _mean_rollouts(arm: str, grid: Grid, entries: Sequence[Entry]) -> float | None:
    """Mean of the medians over the tasks that have a target; None where one is not reached."""
    targets = {task.name for task in grid.tasks if task.target is not None}
    found = [entry.rollouts_to_target for entry in entries if entry.arm == arm and entry.task in targets]
    return fmean(known) if (known := _known(found)) and len(known) == len(found) else None


def _checks(grid: Grid, runs: Sequence[Run], entries: Sequence[Entry]) -> Checks:
    step0: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    base: dict[str, set[str]] = defaultdict(set)
    for run in (run for run in runs if run.status == DONE):
        # the hash is that of one question's logits, and trials ask another one than reports
        where = f"{run.task}, {'report' if run.round == REPORT else 'trials'}"
        step0[where][run.record.get("step0_hash") or _UNKNOWN].add(run.arm)
        base[run.record.get("base_hash") or _UNKNOWN].add(run.arm)
    order = [arm.name for arm in grid.arms]
    random = tuple(
        RandomReward(
            entry.task, entry.arm, entry.difference, entry.gain, _above(entry.difference) or _above(entry.gain)
        )
        for entry in entries
        if next(arm for arm in grid.arms if arm.name == entry.arm).reward == "random"
    )
    return Checks(
        step0={t: {h: tuple(sorted(a, key=order.index)) for h, a in by.items()} for t, by in step0.items()},
        base={h: tuple(sorted(a, key=order.index)) for h, a in base.items()},
        random_reward=random,
        rates={arm.name: len(set(arm.rates)) for arm in grid.arms},
        missing=tuple(_lacking(grid, entry) for entry in entries if set(entry.finals) < set(grid.seeds)),
        warnings=tuple(_warnings(runs, entries)),
    )


def _above(difference: Difference) -> bool:
    return shown(difference) and difference.low is not None and difference.low > 0


def _lacking(grid: Grid, entry: Entry) -> str:
    seeds = ", ".join(str(seed) for seed in grid.seeds if seed not in entry.finals)
    return f"{entry.task} {entry.arm}: nothing reported for seed {seeds}"


def _warnings(runs: Sequence[Run], entries: Sequence[Entry]) -> Iterable[str]:
    for entry in entries:
        if entry.at_end:
            yield f"{entry.task} {entry.arm}: the best rate, {entry.rate:g}, lies at the end of its list"
    done = [run.record for run in runs if run.status == DONE]
    if any(record.get("dirty") for record in done):
        yield "some runs came from a checkout with uncommitted changes"
    facts: dict[str, Callable[[Record], Any]] = {
        "commits": lambda record: record.get("commit"),
        "machines": lambda record: (record.get("hardware") or {}).get("processor"),
        "sets of package versions": lambda record: json.dumps(record.get("versions"), sort_keys=True),
    }
    for what, read in facts.items():
        if (count := len({str(read(record)) for record in done})) > 1:
            yield f"the runs come from {count} {what}"
