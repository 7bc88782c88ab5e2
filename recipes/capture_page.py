"""Says in tables how much of a held-out policy gradient lies in which bases, and in which layers it lies."""

from collections.abc import Mapping, Sequence
from typing import Any

from forklora.recipes.depth import BY_DEPTH, depth_chart
from forklora.recipes.sheet import Plots, Sheet
from forklora.recipes.summary import figure
from forklora.recipes.tables import Table


def capture_sheet(result: Mapping[str, Any], *, model: str, task: str) -> Sheet:
    """The page of one measurement: every figure on it stands in the result."""
    ours, own, random = (_basis(result, name) for name in ("carried span", "the gradient's own", "random"))
    lead = (
        f"Sixteen output directions found without any reward hold {figure(ours['out k=16'], '.1%')} of a layer's "
        f"held-out gradient, where the best that there are hold {figure(own['out k=16'], '.1%')} and random ones "
        f"{figure(random['out k=16'], '.1%')}; sixteen input directions {figure(ours['in k=16'], '.1%')}, "
        f"{figure(own['in k=16'], '.1%')} and {figure(random['in k=16'], '.1%')}."
    )
    note = (
        "Means over the layers that have such a basis. The gradient's own singular vectors are the most that any "
        "basis of as many directions can hold; the span itself is there where a layer writes into the stream; "
        "principal inputs are what EVA starts from, the weight's singular vectors what PiSSA does."
    )
    total = sum(entry["energy"] for entry in result["layers"]) or 1.0
    drawing = depth_chart(((e["layer"], e["energy"] / total) for e in result["layers"]), title="share of the energy")
    return Sheet(
        kicker="forklora capture",
        title=f"What bases hold of the policy gradient of {model}",
        lead=lead,
        facts={"model": model, "task": task, **result["facts"]},
        tables=[
            _shares(result["bases"], "basis", title="share held by basis", note=note),
            _shares(result["rows"], "layers", title="the carried span by type of layer", note=""),
            _energy(result["energy"]),
        ],
        plots=[Plots("Where the gradient's energy lies", BY_DEPTH, [("", drawing)])] if drawing else [],
    )


def _basis(result: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return next(row for row in result["bases"] if row["basis"] == name)


def _shares(rows: Sequence[Mapping[str, Any]], key: str, *, title: str, note: str) -> Table:
    names = [name for name in rows[0] if name != key]
    cells = [(row[key], *(figure(row[name], ".3f") for name in names)) for row in rows]
    return Table(title, (key, *names), tuple(cells), note=note)


def _energy(rows: Sequence[Mapping[str, Any]]) -> Table:
    cells = [(row["layers"], str(row["count"]), figure(row["share"], ".3f")) for row in rows]
    return Table("where the gradient's energy lies", ("layers", "count", "share"), tuple(cells))
