"""Makes the tables of a comparison: titles, headings and rows of text, which page, Markdown and terminal share.

Decisions: missing is an em dash; a difference whose interval holds zero reads "no difference shown", with the interval.
"""

from collections.abc import Iterator, Sequence

from forklora.recipes.comparison_parts import Comparison, Entry
from forklora.recipes.intervals import Difference, WorkingRange, shown
from forklora.recipes.summary import MISSING, figure, text
from forklora.recipes.tables import Table

_HASH = 12  # characters of a hash that are shown


def comparison_tables(found: Comparison) -> list[Table]:
    """All tables of a comparison, results first; one without rows is left out."""
    tables = [*(_results(found, task["name"]) for task in found.grid["tasks"]), _overall(found)]
    tables += [_costs(found), _rates(found), _checks(found), _failures(found), _runs(found)]
    return [table for table in tables if table.rows]


def signed_difference(difference: Difference) -> str:
    """A mean difference with its interval, or why there is none to show."""
    if difference.mean is None:
        return MISSING
    if difference.low is None or difference.high is None:
        return f"{difference.mean:+.3f}, one seed, no interval"
    interval = f"{difference.low:+.3f} to {difference.high:+.3f}"
    return f"{difference.mean:+.3f} ({interval})" if shown(difference) else f"no difference shown ({interval})"


def _results(found: Comparison, task: str) -> Table:
    entries = [entry for entry in found.entries if entry.task == task]
    target = next(t["target"] for t in found.grid["tasks"] if t["name"] == task)
    ks = sorted({k for entry in entries for k in entry.pass_at if k > 1})
    reach = () if target is None else tuple(f"{unit} to {target:g}" for unit in ("steps", "rollouts", "seconds"))
    headings = ("arm", "adapter", "optimizer", "trained numbers", "start", "end", f"end less {found.grid['baseline']}")
    rows = tuple(_result(found, entry, reach=bool(reach), ks=ks) for entry in entries)
    note = (
        "Accuracy on test questions, median over seeds; the difference is paired by seed, with its 95 % interval. "
        "Steps, rollouts and seconds to the target are medians over seeds, those for bases included; a seed that never "
        "reaches it counts as infinity, and so the median may be not reached. Each interval stands for itself: of "
        "twenty arms without any difference, one leaves zero out by chance."
    )
    seeds = f"end, seed {' / '.join(str(seed) for seed in found.grid['seeds'])}"
    return Table(task, (*headings, *reach, *(f"pass@{k}" for k in ks), seeds), rows, words=3, note=note)


def _result(found: Comparison, entry: Entry, *, reach: bool, ks: Sequence[int]) -> tuple[str, ...]:
    start, end = figure(entry.start), figure(entry.final)
    against = MISSING if entry.arm == found.grid["baseline"] else signed_difference(entry.difference)
    to_target = (entry.steps_to_target, ",g"), (entry.rollouts_to_target, ",.0f"), (entry.seconds_to_target, ",.0f")
    reached = [reached_figure(entry, value, form=form) for value, form in to_target if reach]
    passed = [figure(entry.pass_at.get(k)) for k in ks]
    named = (entry.arm, entry.adapter, entry.optimizer, figure(entry.trained, ",.0f"))
    each = " / ".join(figure(entry.finals.get(seed)) for seed in found.grid["seeds"])
    return (*named, start, end, against, *reached, *passed, each)


def reached_figure(entry: Entry, value: float | None, *, form: str = ",.0f") -> str:
    """A figure of the way to the target: "not reached" where runs are done and most of them never got there."""
    return "not reached" if value is None and entry.finals else figure(value, form)


def _overall(found: Comparison) -> Table:
    baseline = found.grid["baseline"]
    rows = tuple(
        (
            one.arm,
            one.adapter,
            figure(one.start),
            figure(one.final),
            MISSING if one.arm == baseline else signed_difference(one.difference),
            figure(one.rollouts_to_target, ",.0f"),
        )
        for one in found.overall
    )
    note = "Means over tasks, taken seed by seed; then as above. Rollouts: mean of the tasks' medians."
    headings = ("arm", "adapter", "start", "end", f"end less {baseline}", "rollouts to the targets")
    return Table("mean of tasks", headings, rows, words=2, note=note)


def _costs(found: Comparison) -> Table:
    headings = (
        "task", "arm", "seconds before the first step", "seconds of training", "peak MiB", "adapter KiB", "KL to base",
        "text loss", "untrained task", "weights changed", "stable rank", "top-16 energy", "norm",
    )  # fmt: skip
    rows = tuple(
        (
            entry.task,
            entry.arm,
            figure(entry.costs.init_seconds, ",.1f"),
            figure(entry.costs.training_seconds, ",.0f"),
            figure(entry.costs.peak_mib, ",.0f"),
            figure(entry.costs.adapter_bytes, ",.0f", unit=1024),
            figure(entry.costs.kl),
            figure(entry.costs.text_loss, "+.3f"),
            figure(entry.costs.untrained, "+.3f"),
            figure(entry.costs.changed_share, ".1%"),
            figure(entry.costs.stable_rank, ".2f"),
            figure(entry.costs.top16_energy, ".3f"),
            figure(entry.costs.norm, ".2f"),
        )
        for entry in found.entries
    )
    note = (
        "Medians over seeds. KL to the base model in nats per token of the policy's own completions; text loss (nats "
        "per token of ordinary text) and accuracy on a task that was not trained, each after less before; share of the "
        "adapted weights that change in bfloat16; rank and energy are means over layers. Runs that went on side by "
        f"side on one machine: {found.grid['beside']}."
    )
    return Table("costs, and what is left of the model", headings, rows, words=2, note=note)


def _rates(found: Comparison) -> Table:
    rows = tuple(
        (
            entry.task,
            entry.arm,
            figure(entry.rate, "g") + (", at an end" if entry.at_end else ""),
            _working(entry.working),
            ", ".join(f"{rate:g}: {figure(value)}" for rate, value in sorted(entry.trial1.items())),
        )
        for entry in found.entries
        if entry.trial1
    )
    note = (
        f"Validation accuracy after {found.grid['trials'][0]['steps']} steps at each rate. A rate works where its gain "
        "over the start is at least half of the arm's best; at an end of the list the range may be wider."
    )
    return Table("rates", ("task", "arm", "chosen", "rates that work", "first round"), rows, words=5, note=note)


def _working(found: WorkingRange | None) -> str:
    if found is None:
        return MISSING
    least = "≥ " if found.open_low or found.open_high else ""
    ratio = found.high / found.low
    return f"{found.low:.2g} to {found.high:.2g}: {least}{ratio:.3g} times"


def _checks(found: Comparison) -> Table:
    return Table("checks", ("check", "found"), tuple(_check_rows(found)), words=2)


def _check_rows(found: Comparison) -> Iterator[tuple[str, str]]:
    for where, groups in found.checks.step0.items():
        said = "; ".join(f"{digest[:_HASH]}: {', '.join(arms)}" for digest, arms in groups.items())
        yield (
            f"logits before the first step ({where})",
            f"{len(groups)} different: {said}" if len(groups) > 1 else "equal",
        )
    many = "; ".join(f"{digest[:_HASH]}: {', '.join(arms)}" for digest, arms in found.checks.base.items())
    yield "base weights", "equal" if len(found.checks.base) == 1 else many
    counts = set(found.checks.rates.values())
    yield "rates of an arm", f"{counts.pop()} each" if len(counts) == 1 else str(found.checks.rates)
    for one in found.checks.random_reward:
        said = (
            f"end less start {signed_difference(one.over_start)}, less baseline {signed_difference(one.over_baseline)}"
        )
        yield (
            f"random reward: {one.task} {one.arm}",
            f"{'WINS, which it must not' if one.wins else 'does not win'}: {said}",
        )
    for warning in found.checks.warnings:
        yield "note", warning


def _failures(found: Comparison) -> Table:
    rows = tuple((text(line),) for line in found.failures)
    return Table("failed or missing", ("run",), rows, note="A run that failed is tried again by `forklora compare`.")


def _runs(found: Comparison) -> Table:
    rows = tuple(
        (
            run.task,
            run.round,
            run.arm,
            run.status,
            figure(run.rate, "g"),
            figure(run.seed, ".0f"),
            figure(run.accuracy_start),
            figure(run.accuracy_final),
            figure(run.seconds, ",.0f"),
        )
        for run in found.runs
    )
    headings = ("task", "round", "arm", "status", "rate", "seed", "start", "end", "seconds in all")
    return Table("all runs", headings, rows, words=4, folded=True)
