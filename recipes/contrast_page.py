"""Says what several ways of training did to the weights of one model: tables and drawings of a contrast's records."""

from collections.abc import Mapping, Sequence
from typing import Any

from forklora.recipes import plots
from forklora.recipes.depth import layer_depth
from forklora.recipes.sheet import Plots, Sheet
from forklora.recipes.summary import MISSING, figure
from forklora.recipes.tables import Table

_SIZE = (430.0, 280.0)


def contrast_sheet(result: Mapping[str, Any]) -> Sheet:
    """The page of a contrast: every figure on it stands in the result."""
    plan = result["plan"]
    best = best_runs(result["runs"])
    tables = [_what_became(best, top=plan["top"]), _where(best), _runs(result["runs"], best)]
    return Sheet(
        kicker="forklora contrast",
        title=f"Ways to train {plan['model']['name']} on {plan['task']['name']}",
        lead=_lead(best),
        facts=_facts(plan),
        tables=[table for table in tables if table.rows],
        plots=[drawn for drawn in (_by_depth(best),) if drawn],
    )


def best_runs(runs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of each arm the finished run with the best validation accuracy, the lowest rate among equals."""
    arms = dict.fromkeys(run["arm"] for run in runs)
    done = {arm: [run for run in runs if run["arm"] == arm and run["status"] == "done"] for arm in arms}
    return [max(found, key=lambda run: (run["validation"], -run["rate"])) for found in done.values() if found]


def _whole(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """What became of all matrices that were trained together."""
    return next(row for row in run["update"]["rows"] if row["weights"] == "all matrices")


def _lead(best: Sequence[Mapping[str, Any]]) -> str:
    said = [
        f"{run['arm']} ends at {run['test']:.3f}, {_whole(run)['unchanged_bf16']:.1%} of the weights unchanged"
        for run in best
    ]
    return "; ".join(said) + "." if said else "No run has ended well."


def _facts(plan: Mapping[str, Any]) -> dict[str, str]:
    questions = plan["evaluation"]
    return {
        "model": f"{plan['model']['name']} in {plan['model']['dtype']}, every linear layer's weights trained",
        "steps": f"{plan['steps']} of {plan['prompts']} prompts; {plan['group']} completions of each in rl, else one",
        "rl": "score-centered policy gradient on the task's own reward",
        "distill": "reverse divergence to the best rl-adamw run on the student's own samples",
        "sft": "log-likelihood of the right answers",
        "accuracy": f"{questions['prompts']} questions, {questions['samples']} answers each; rates chosen on others",
        "forks": f"of the untrained model, rollouts of {plan['forks']} prompts",
        "seed": f"{plan['seed']}, one seed",
    }


def _what_became(best: Sequence[Mapping[str, Any]], *, top: int) -> Table:
    headings = ("arm", "rate", "start", "end", "unchanged", "1e-5", "1e-3", "norm", "stable rank", f"energy in {top}")
    headings += ("rank at 1e-5", "of full")
    rows = []
    for run in best:
        row = _whole(run)
        shares = (figure(row[f"unchanged_{rule}"]) for rule in ("bf16", "absolute", "relative"))
        ranks = (figure(row["numerical_rank"], ".0f"), figure(row["full_rank"]))
        spread = (figure(row["norm"], ".3g"), figure(row["stable_rank"], ".1f"), figure(row["top_energy"]))
        rows.append(
            (run["arm"], f"{run['rate']:g}", figure(run["start"]), figure(run["test"]), *shares, *spread, *ranks)
        )
    note = (
        "Each arm at the rate with the best validation accuracy. Ranks and energies are medians over matrices; "
        "unchanged: equal in bfloat16, within 1e-5 there, within a share of 1e-3 as stored."
    )
    return Table("what became of the weights", headings, tuple(rows), note=note)


def _where(best: Sequence[Mapping[str, Any]]) -> Table:
    headings = ("arm", "output", "random", "input", "random", "both", "random", "own left", "random", "turned, degrees")
    rows = []
    for run in best:
        inside = next((row for row in run["update"]["captured"] if row["layers"] == "all layers"), None)
        row = _whole(run)
        cells = [run["arm"]]
        for side in ("output", "input", "both"):
            cells += [_interval(inside, side), figure(inside and inside[f"random_{side}"], ".4f")]
        own = (figure(row["principal_left"], ".4f"), figure(row["principal_left_random"], ".4f"))
        rows.append((*cells, *own, figure(row["rotation"], ".3g")))
    note = (
        "Share of the update's energy inside the bases that carry the base model's forks down to each layer, with the "
        "95 % interval of the mean over layers, beside random directions; then the overlap of the update's leading "
        "directions with the weight's own, and how far these have turned."
    )
    return Table("where the update lies", headings, tuple(rows), note=note)


def _interval(inside: Mapping[str, Any] | None, side: str) -> str:
    if inside is None:
        return MISSING
    found = inside[side]
    return f"{found['mean']:.3f} ({found['low']:.3f} to {found['high']:.3f})"


def _runs(runs: Sequence[Mapping[str, Any]], best: Sequence[Mapping[str, Any]]) -> Table:
    chosen = {run["run"] for run in best}
    rows = [
        (
            run["arm"],
            f"{run['rate']:g}" + (" *" if run["run"] in chosen else ""),
            run["status"] if run["error"] is None else f"{run['status']}: {run['error']}",
            figure(run.get("validation")),
            figure(run.get("test")),
            figure(run.get("seconds"), ".0f"),
        )
        for run in runs
    ]
    headings = ("arm", "rate", "status", "validation", "test", "seconds")
    return Table("all runs", headings, tuple(rows), words=3, note="A star: the rate that is reported.")


def _by_depth(best: Sequence[Mapping[str, Any]]) -> Plots | None:
    """One drawing for a figure: an arm is a line, a point the mean over the matrices of a block."""
    drawings = []
    for key, title in (("stable_rank", "stable rank"), ("unchanged_bf16", "share of weights unchanged")):
        lines = [(run["arm"], hue, _by_block(run["update"]["matrices"], key)) for hue, run in enumerate(best)]
        series = [plots.Series(arm, hue, points) for arm, hue, points in lines if points]
        if series:
            said = f"{title} against the layer's depth, one line per way of training"
            drawings.append(("", plots.line_chart(series, titles=("block", title), description=said, size=_SIZE)))
    return Plots("By depth", "Mean over the matrices of a block.", drawings) if drawings else None


def _by_block(matrices: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    blocks: dict[int, list[float]] = {}
    for entry in matrices:
        depth = layer_depth(entry["name"])
        if depth is not None and entry[key] is not None:
            blocks.setdefault(depth, []).append(entry[key])
    return [(float(depth), sum(values) / len(values)) for depth, values in sorted(blocks.items())]
