"""Says in tables and drawings what an update has done to a model's weights."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forklora.recipes.depth import BY_DEPTH, depth_chart
from forklora.recipes.sheet import Plots, Sheet
from forklora.recipes.summary import MISSING, figure
from forklora.recipes.tables import Table

_NAMED = 5  # of the weights that stand on one side alone
_UNCHANGED = "unchanged: equal in bfloat16; within 1e-5 there; within a share of 1e-3 as stored."
_MEDIANS = "Ranks and energies are medians over the matrices that moved, shares of unchanged weights count all weights."


def measuring_sheet(result: Mapping[str, Any]) -> Sheet:
    """The page of one measurement: every figure on it stands in the result."""
    plan, rows = result["plan"], result["rows"]
    tables = [_spread(rows, top=plan["top"]), _principal(rows, top=plan["top"])]
    tables += [captured_table(result["captured"])] if result["captured"] else []
    tables += [_every(result["matrices"], top=plan["top"])]
    return Sheet(
        kicker="forklora measure",
        title=f"{_short(plan['tuned'])} beside {_short(plan['base'])}",
        lead=_lead(rows, top=plan["top"]),
        facts=_facts(result),
        tables=tables,
        plots=[drawn for drawn in (_by_depth(result["matrices"], top=plan["top"]),) if drawn],
    )


def _lead(rows: Sequence[Mapping[str, Any]], *, top: int) -> str:
    whole = next((row for row in rows if row["weights"] == "all matrices"), rows[0])
    if not whole["moved"]:
        return f"Nothing moved: all {whole['numbers']:,} weights are what they were."
    return (
        f"{whole['moved']} of {whole['count']} matrices moved. {whole['unchanged_bf16']:.1%} of the weights are "
        f"unchanged in bfloat16; the median update has a stable rank of {figure(whole['stable_rank'], '.1f')} and "
        f"{figure(whole['top_energy'], '.1%')} of its energy in {top} directions."
    )


def _short(source: str) -> str:
    """A hub id as it is, of a folder the last two names."""
    return "/".join(Path(source).parts[-2:])


def _facts(result: Mapping[str, Any]) -> dict[str, str]:
    plan, exact = result["plan"], sum(entry["exact"] for entry in result["matrices"])
    found = {"before": plan["base"], "after": plan["tuned"]}
    rest = len(result["matrices"]) - exact
    found["decomposed"] = f"{exact} matrices exactly, {rest} by a randomized SVD"
    worst = max((entry["error"] for entry in result["matrices"]), default=0.0)
    if rest:
        found["error"] = (
            f"a singular value of the update lies within {worst:.2g} of each that was found, relative to it"
        )
    for key, what in (("only_base", "only before"), ("only_tuned", "only after")):
        names = result[key]
        if names:
            more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            found[what] = f"{', '.join(names[:_NAMED])}{more}"
    forks = plan["trace"] or (plan["task"] or {}).get("name")
    return found | ({"forks": f"of {forks}"} if forks else {})


def _spread(rows: Sequence[Mapping[str, Any]], *, top: int) -> Table:
    headings = ("weights", "count", "moved", "millions", "unchanged", "1e-5", "1e-3", "norm", "stable rank")
    cells = [
        (
            row["weights"],
            f"{row['count']}",
            figure(row["moved"], ".0f"),
            figure(row["numbers"] / 1e6, ",.3g" if row["numbers"] < 1e8 else ",.0f"),
            *(figure(row[f"unchanged_{rule}"], ".3f") for rule in ("bf16", "absolute", "relative")),
            figure(row["norm"], ".3g"),
            figure(row["stable_rank"], ".1f"),
            figure(row["top_energy"], ".3f"),
            figure(row["numerical_rank"], ".0f"),
            figure(row["full_rank"], ".3f"),
        )
        for row in rows
    ]
    headings += (f"energy in {top}", "rank at 1e-5", "of full")
    return Table("size and spread", headings, tuple(cells), note=f"{_MEDIANS} {_UNCHANGED}")


def _principal(rows: Sequence[Mapping[str, Any]], *, top: int) -> Table:
    note = (
        f"Overlap of the update's {top} leading singular vectors with as many of the weight's own, beside random "
        "directions; and the mean angle by which the weight's own left ones have turned."
    )
    headings = ("weights", "left", "random", "right", "random", "turned, degrees")
    keys = ("principal_left", "principal_left_random", "principal_right", "principal_right_random")
    cells = [
        (row["weights"], *(figure(row[key], ".4f") for key in keys), figure(row["rotation"], ".3g"))
        for row in rows
        if row["moved"]
    ]
    return Table("beside the weights' own directions", headings, tuple(cells), note=note)


def captured_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Shares of the update's energy inside the spans of the forks."""
    note = (
        "Share of the update's energy inside the bases that carry the forks' signal down, with the 95 % interval of "
        "the mean over layers, beside random directions; span: inside the span itself, where a layer writes into the "
        "stream."
    )
    headings = ("layers", "count", "output", "random", "input", "random", "both", "random", "span")
    cells = [
        (
            row["layers"],
            f"{row['count']}",
            *(text for side in ("output", "input", "both") for text in _beside(row, side)),
            _with_interval(row["span"]),
        )
        for row in rows
    ]
    return Table("share inside the spans of the forks", headings, tuple(cells), note=note)


def _beside(row: Mapping[str, Any], side: str) -> tuple[str, str]:
    return _with_interval(row[side]), figure(row[f"random_{side}"], ".4f")


def _with_interval(found: Mapping[str, float] | None) -> str:
    return MISSING if found is None else f"{found['mean']:.3f} ({found['low']:.3f} to {found['high']:.3f})"


def _every(matrices: Sequence[Mapping[str, Any]], *, top: int) -> Table:
    headings = ("weight", "size", "unchanged", "norm", "stable rank", f"energy in {top}", "rank at 1e-5", "error")
    cells = [
        (
            entry["name"],
            " x ".join(map(str, entry["shape"])),
            figure(entry["unchanged_bf16"], ".3f"),
            figure(entry["norm"], ".3g"),
            figure(entry["stable_rank"], ".1f"),
            figure(entry["top_energy"], ".3f"),
            figure(entry["numerical_rank"], ".0f"),
            figure(entry["error"], ".2g"),
        )
        for entry in matrices
    ]
    return Table("every matrix", headings, tuple(cells), words=2, folded=True)


def _by_depth(matrices: Sequence[Mapping[str, Any]], *, top: int) -> Plots | None:
    titles = {"stable_rank": "stable rank of the update", "top_energy": f"share of its energy in {top} directions"}
    found = [
        depth_chart(((entry["name"], entry[key]) for entry in matrices), title=title) for key, title in titles.items()
    ]
    drawings = [("", drawing) for drawing in found if drawing is not None]
    return Plots("The update by depth", BY_DEPTH, drawings) if drawings else None
