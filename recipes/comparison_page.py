"""Puts the tables and plots of a comparison on one page that needs no script and loads nothing."""

from collections.abc import Sequence
from typing import Any

from forklora.recipes.comparison_parts import Comparison, Entry
from forklora.recipes.comparison_plots import Spot, curve_panel, pareto_chart, rate_panel
from forklora.recipes.comparison_words import facts, verdict
from forklora.recipes.sheet import package_templates
from forklora.recipes.tables import Table
from markupsafe import Markup

_ROOM = 0.05  # above the highest accuracy


def comparison_html(found: Comparison, tables: Sequence[Table]) -> str:
    """The page of a comparison; the same records always give the same bytes."""
    return (
        package_templates()
        .get_template("comparison.html.j2")
        .render(
            grid=found.grid,
            verdict=verdict(found),
            facts=facts(found),
            tables=tables,
            tasks=[_task(found, task) for task in found.grid["tasks"]],
        )
    )


def _task(found: Comparison, task: dict[str, Any]) -> dict[str, Any]:
    """The plots of one task."""
    entries = [entry for entry in found.entries if entry.task == task["name"]]
    tried = [value for entry in entries for value in entry.trial1.values() if value is not None]
    seen = [accuracy for entry in entries for curve in entry.curves.values() for _, _, accuracy in curve]
    widest = (
        max((rollouts for e in entries for curve in e.curves.values() for rollouts, _, _ in curve), default=0.0) or 1.0
    )
    top = min(1.0, max([*tried, *seen, task["target"] or 0.0], default=1.0) + _ROOM)
    baseline = next(entry for entry in entries if entry.arm == found.grid["baseline"])
    rates = [(entry.arm, _rates(entry, top)) for entry in entries if entry.trial1]
    curves = [
        (entry.arm, _curves(entry, baseline, target=task["target"], widest=widest, top=top))
        for entry in entries
        if any(entry.curves.values())
    ]
    known = {"name": task["name"], "target": task["target"]}
    return known | {"rates": rates, "curves": curves, "pareto": _pareto(entries, target=task["target"])}


def _rates(entry: Entry, top: float) -> Markup:
    ends = min(entry.trial1), max(entry.trial1)
    return rate_panel(entry.trial1, start=entry.trial_start, chosen=entry.rate, top=top, rates=ends)


def _curves(entry: Entry, baseline: Entry, *, target: float | None, widest: float, top: float) -> Markup:
    mine, other = (
        {seed: [(rollouts, accuracy) for rollouts, _, accuracy in curve] for seed, curve in one.curves.items()}
        for one in (entry, baseline)
    )
    behind = {} if entry.arm == baseline.arm else other
    return curve_panel(mine, behind=behind, target=target, widest=widest, top=top)


def _pareto(entries: Sequence[Entry], *, target: float | None) -> list[Markup]:
    sized = [(entry, float(entry.trained)) for entry in entries if entry.trained]
    if len(sized) < 2:  # noqa: PLR2004 - one arm beats nobody
        return []
    rollouts = [Spot(entry.arm, numbers, entry.rollouts_to_target) for entry, numbers in sized]
    gains = [Spot(entry.arm, numbers, entry.gain.mean) for entry, numbers in sized]
    charts = [pareto_chart(gains, title="gain in accuracy", lower=False)]
    reached = target is not None and any(spot.height is not None for spot in rollouts)
    return [*charts, pareto_chart(rollouts, title="rollouts to the target", lower=True)] if reached else charts
