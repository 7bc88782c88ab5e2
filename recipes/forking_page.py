"""Shows the forks of a model's rollouts: a map of them, the commonest ones, their span, and the bounds of theory."""

from collections.abc import Mapping, Sequence
from typing import Any

from forklora.recipes import plots
from forklora.recipes.forkmap import EDGES, SURE, finite, fork_map, visible
from forklora.recipes.sheet import Plots, Sheet, package_templates
from forklora.recipes.summary import figure
from forklora.recipes.tables import Table
from markupsafe import Markup

_SIZE = (430.0, 280.0)
_BARS = " ▁▂▃▄▅▆▇█"
_LINE = 100  # characters of the map in a terminal
_SHOWN = 4  # rollouts there


def forking_sheet(result: Mapping[str, Any]) -> Sheet:
    """The page of one look at the forks: every figure on it stands in the result."""
    figures, subject = result["figures"], result["subject"]
    asked = subject["task"]["name"] if subject["task"] else subject["prompts"]
    rows = result["rows"]
    mapped = f"The first {len(rows)} of {figures['rollouts']} rollouts."
    body = package_templates().get_template("forks.html.j2")
    tables = [_counts(result), *([_frequent(result["frequent"])] if result["frequent"] else [])]
    tables += [_bounds(result["bounds"])] if result["bounds"] else []
    return Sheet(
        kicker="forklora forks",
        title=f"Where {subject['model']['name']} could have gone another way",
        lead=_lead(figures),
        facts={
            "model": f"{subject['model']['name']}, {subject['model']['dtype']}",
            "prompts": f"{figures['prompts']} of {asked}, {subject['group']} completions each",
            "candidates": f"the fewest tokens that hold {subject['mass']:g} of the probability, "
            f"{subject['cap']} at most",
            "seed": str(subject["seed"]),
        },
        tables=tables,
        plots=[drawn for drawn in (_spectrum(result["spectrum"]),) if drawn],
        body=Markup(body.render(map=fork_map({"rows": rows}), edges=EDGES, sure=SURE, said=mapped)),  # noqa: S704
    )


def terminal_map(rows: Sequence[Mapping[str, Any]], *, line: int = _LINE) -> str:
    """A few rollouts in plain text: the tokens, and above each one a bar of ``tr C``."""
    shown = [row for row in rows if row["tokens"]][:_SHOWN]
    tallest = max((finite(token["spread"]) for row in shown for token in row["tokens"]), default=0.0)
    found = []
    for row in shown:
        bars, words = "", ""
        for token in row["tokens"]:
            text = visible(token["text"])
            if words and len(words) + len(text) + 1 > line:
                found += [bars.rstrip(), words, ""]
                bars, words = "", ""
            height = finite(token["spread"]) / tallest if tallest > 0 else 0.0
            bars += _BARS[round(height * (len(_BARS) - 1))] + " " * len(text)
            words += text + " "
        found += [bars.rstrip(), words, ""]
    return "\n".join(found)


def _lead(figures: Mapping[str, Any]) -> str:
    if not figures["forks"]:
        return f"No fork in {figures['positions']:,} drawn tokens: the model was sure everywhere."
    said = (
        f"{figures['forks']:,} of {figures['positions']:,} drawn tokens stand at a fork, {figures['distinct_forks']:,} "
    )
    said += "different ones by their candidates"
    held = figures["spread_at_forks"]
    return said + (f"; they hold {held:.1%} of tr C, the expected square of the backward signal." if held else ".")


def _counts(result: Mapping[str, Any]) -> Table:
    figures, span = result["figures"], result["span"]
    rows = [
        ("rollouts", figure(figures["rollouts"], ",.0f")),
        ("drawn tokens", figure(figures["positions"], ",.0f")),
        ("forks", figure(figures["forks"], ",.0f")),
        ("different forks", figure(figures["distinct_forks"], ",.0f")),
        ("candidates at a fork, mean", figure(figures["mean_candidates"], ".2f")),
        ("mass outside the candidates, mean", figure(figures["mean_leak"], ".4f")),
        ("the same, at forks", figure(figures["leak_at_forks"], ".4f")),
        ("tr C, mean", figure(figures["mean_spread"], ".4g")),
        ("share of tr C at forks", figure(figures["spread_at_forks"], ".4f")),
        ("share of tr C in the tallest tenth on the map", figure(figures["top_tenth"], ".4f")),
    ]
    rows += [("reward, mean", figure(figures["mean_reward"], ".3f"))] if figures["mean_reward"] is not None else []
    if span is not None:
        rows += [
            (f"directions that hold {entry['share']:g} of the candidates' covariance", str(entry["dimension"]))
            for entry in span["held"]
        ]
        rows += [("dim D, directions of the span", str(span["dimension"]))]
        rows += [("its bound, the sum of candidates less one", f"{span['counted']:,}")]
    return Table("the forks in numbers", ("figure", "value"), tuple(rows))


def _frequent(frequent: Sequence[Mapping[str, Any]]) -> Table:
    """The commonest forks: forks between the same tokens are one."""
    rows = [
        (
            visible(fork["context"]),
            " │ ".join(f"{visible(text)} {share:.2f}" for text, share in fork["candidates"]),
            f"{fork['count']:,}",
        )
        for fork in frequent
    ]
    note = "Forks between the same tokens count as one; the words before the first of them, and mean probabilities."
    return Table("the commonest forks", ("after", "candidates", "count"), tuple(rows), words=2, note=note)


def _bounds(bounds: Mapping[str, Any]) -> Table:
    note = (
        "w are output vectors, B the largest norm of one. What is recorded over the whole vocabulary stands beside "
        "what theory allows; mass outside the stored candidates counts as far as it can lie."
    )
    every = f"{bounds['positions']:,} positions"
    rows = (
        (
            "tr C ≤ Σ μ |w − w_top|²",
            f"broken at {bounds['spread_above_near']} of {every}",
            f"median share {figure(bounds['spread_of_near'], '.3f')}",
        ),
        (
            "Σ μ |w − w_top|² ≤ 4 B² (1 − max μ)",
            f"broken at {bounds['near_above_far']} of {every}",
            f"median share {figure(bounds['near_of_far'], '.3f')}",
        ),
        (
            "mean |(I − P) δ|² ≤ 4 B² leak",
            f"{figure(bounds['outside'], '.3g')} ≤ {figure(bounds['outside_bound'], '.3g')}",
            f"{figure(bounds['outside_share'], '.4f')} of |δ|² outside",
        ),
    )
    return Table("bounds of theory on these data", ("bound", "found", "how close"), rows, words=3, note=note)


def _spectrum(values: Sequence[float]) -> Plots | None:
    kept = [value for value in values if value > 0]
    if not kept:
        return None
    line = [plots.Series("mean covariance", 0, [(float(i), value) for i, value in enumerate(kept, 1)])]
    drawings = [("", plots.eigenvalue_chart(line, size=_SIZE)), ("", plots.cumulative_chart(line, size=_SIZE))]
    note = f"Eigenvalues of the mean of δ δᵀ over all drawn tokens, the {len(kept)} largest, and their running share."
    return Plots("The averaged covariance of the output vectors", note, drawings)
