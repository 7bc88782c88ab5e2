"""Says in tables where a policy's Fisher is, and how far it caps the gradient that rewards give."""

from collections.abc import Mapping, Sequence
from typing import Any

from forklora.recipes.depth import BY_DEPTH, depth_chart
from forklora.recipes.sheet import Plots, Sheet
from forklora.recipes.summary import figure
from forklora.recipes.tables import Table

_PUBLISHED = "47.4 % at 1 % of the coordinates is what Zhang, Mukherjee and Peng (2026) found on larger models."


def fisher_sheet(result: Mapping[str, Any]) -> Sheet:
    """The page of one Fisher: every figure on it stands in the result."""
    figures, subject = result["figures"], result["subject"]
    tables = [_together(figures), _by_type(result["rows"])]
    tables += [_kronecker(result["factored"])] if result["factored"] else []
    tables += [_every(result["layers"])]
    return Sheet(
        kicker="forklora fisher",
        title=f"What {subject['model']['name']} could learn, coordinate by coordinate",
        lead=_lead(figures),
        facts={
            "model": f"{subject['model']['name']}, {subject['model']['dtype']}",
            "task": f"{subject['task']['name']}, {subject['count']} prompts, {subject['group']} completions each",
            "halves": "the Fisher is that of the prompts 1, 3, 5, ..., the other gradient that of 2, 4, 6, ...",
            "seed": str(subject["seed"]),
        },
        tables=tables,
        plots=[drawn for drawn in (_by_depth(result["layers"]),) if drawn],
    )


def _lead(figures: Mapping[str, Any]) -> str:
    if figures["held_other"] is None:
        return "No rewards differ within a group, so there is no gradient to hold against the Fisher."
    return (
        f"The top {figures['share']:.2%} of the coordinates by Fisher hold {figures['held_other']:.1%} of the top "
        f"{figures['share']:.2%} by gradient of other completions, and {figures['held_same']:.1%} of those of the same "
        f"ones; chance is {figures['share']:.2%}."
    )


def _together(figures: Mapping[str, Any]) -> Table:
    share = f"{figures['share']:g}"
    rows = (
        ("completions", f"{figures['rollouts']:,}"),
        ("coordinates", f"{figures['coordinates']:,}"),
        (f"largest {share} by gradient, held by Fisher, same completions", figure(figures["held_same"], ".4f")),
        (f"largest {share} by gradient, held by Fisher, other completions", figure(figures["held_other"], ".4f")),
        (f"largest {share} by Fisher, found again in other completions", figure(figures["fisher_kept"], ".4f")),
        (f"largest {share} by gradient, found again in other completions", figure(figures["gradient_kept"], ".4f")),
        (
            "share of the coordinates that holds half of the Fisher",
            figure(figures["numbers_that_hold_half_the_fisher"], ".4f"),
        ),
        ("deviation of the advantage", figure(figures["deviation"], ".3f")),
    )
    return Table("the largest coordinates", ("figure", "value"), rows, note=_PUBLISHED)


def _by_type(rows: Sequence[Mapping[str, Any]]) -> Table:
    note = (
        "Shares of all coordinates, of the Fisher, of the squared gradient and of the largest coordinates; and the "
        "cap |G| ≤ std(A) √F: share of the coordinates that break it, and mean of |G| over the cap. On the same "
        "completions it holds always, on others in expectation."
    )
    headings = ("layers", "count", "of numbers", "of Fisher", "of gradient²", "of top Fisher", "of top gradient")
    headings += ("broken, same", "broken, other", "tight, same", "tight, other")
    keys = ("numbers_share", "fisher_share", "gradient_energy_share", "top_fisher_share", "top_gradient_share")
    caps = ("same_broken", "other_broken", "same_tightness", "other_tightness")
    cells = [
        (
            row["layers"],
            str(row["count"]),
            *(figure(row[key], ".3f") for key in keys),
            *(figure(row[c], ".4f") for c in caps),
        )
        for row in rows
    ]
    return Table("where the Fisher is, and the cap of each coordinate", headings, tuple(cells), note=note)


def _kronecker(layers: Sequence[Mapping[str, Any]]) -> Table:
    note = (
        "|γ| ≤ std(A) √(T σ η) in the eigenbases of the mean signal and input: share of the coefficients that break "
        "it, share of the squared gradient in them, and mean of |γ| over the cap. K-FAC takes signal and input for "
        "independent."
    )
    cells = [
        (
            entry["layer"],
            f"{entry['numbers']:,}",
            figure(entry["broken"] / entry["numbers"], ".4f"),
            figure(entry["energy_broken"], ".4f"),
            figure(entry["tightness"], ".3f"),
        )
        for entry in layers
    ]
    return Table("the K-FAC cap", ("layer", "numbers", "broken", "of gradient²", "tight"), tuple(cells), note=note)


def _every(layers: Sequence[Mapping[str, Any]]) -> Table:
    cells = [
        (
            entry["layer"],
            f"{entry['numbers']:,}",
            figure(entry["fisher"], ".3g"),
            figure(entry["gradient_energy"], ".3g"),
            f"{entry['top_fisher']:,}",
            figure(entry["other"]["broken"] / entry["numbers"], ".4f"),
        )
        for entry in layers
    ]
    headings = ("layer", "numbers", "Fisher", "gradient²", "of the top Fisher", "broken, other")
    return Table("every layer", headings, tuple(cells), folded=True)


def _by_depth(layers: Sequence[Mapping[str, Any]]) -> Plots | None:
    drawings = []
    for key, title in (("fisher", "share of the Fisher"), ("gradient_energy", "share of the squared gradient")):
        total = sum(entry[key] for entry in layers) or 1.0
        drawing = depth_chart(((entry["layer"], entry[key] / total) for entry in layers), title=title)
        drawings += [] if drawing is None else [("", drawing)]
    return Plots("By depth", BY_DEPTH, drawings) if drawings else None
