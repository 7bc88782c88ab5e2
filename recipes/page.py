"""Records into the HTML page: collects what the template shows, draws the plots, escapes every text.

The page needs no script and loads nothing; its own content policy forbids both.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from forklora.recipes import plots
from forklora.recipes.forkmap import EDGES, SURE, fork_map
from forklora.recipes.sheet import package_templates
from forklora.recipes.summary import (
    MISSING,
    TEXT_COLUMNS,
    Record,
    arm_settings,
    figure,
    number,
    points,
    seconds,
    summary_table,
    text,
)

WIDE, NARROW, PANEL = (900.0, 400.0), (360.0, 330.0), (430.0, 280.0)
ENERGY = 0.9
MOST_NAMED = 3
SOURCE = ("commit", "dirty", "seed", "step0_hash", "base_hash")
BROKEN = ("failed", "interrupted")
UNEXPLAINED = "failed without a recorded error"
CURVE_COLUMNS = {"step": ",.0f", "rollouts": ",.0f", "seconds": ",.1f", "train_reward": ".3f", "eval_reward": ".3f"}


def render_page(records: Sequence[Record], traces: Sequence[Record | None]) -> str:
    """The HTML page of one record or more; `traces[i]` is what trace/tokens.json of `records[i]` holds, or None."""
    facts = [_facts(record) for record in records]
    shared = _shared(facts)
    rows = summary_table(records)
    return (
        package_templates()
        .get_template("report.html.j2")
        .render(
            title=_title(records),
            sentence=_sentence(records),
            headings=[heading for heading in rows[0] if heading != "error"],
            text_columns=TEXT_COLUMNS,
            arms=[
                _arm(record, row, facts=_own(fact, shared)) | {"hue": plots.hue_class(place)}
                for place, (record, row, fact) in enumerate(zip(records, rows, facts, strict=True))
            ],
            interval=_interval(records),
            curves=_curves(records),
            forks=[(names, fork_map(trace), trace.get("problem")) for names, _, trace in _by_value(records, traces)],
            edges=EDGES,
            sure=SURE,
            spectra=_spectra(records),
            shared=shared,
            missing=MISSING,
        )
    )


def _title(records: Iterable[Record]) -> str:
    tasks = dict.fromkeys(text(record["task"]) for record in records if record.get("task"))
    models = [((record.get("recipe") or {}).get("model") or {}).get("name") for record in records]
    named = ", ".join(dict.fromkeys(text(model) for model in models if model))
    return (", ".join(tasks) or "forklora run") + (f" on {named}" if named else "")


def _sentence(records: Sequence[Record]) -> str:
    """What came out, in one sentence that claims no more than the records hold."""
    broken = [f"{text(record.get('arm'))} {record['status']}" for record in records if record.get("status") in BROKEN]
    targets = {target for record in records if (target := number(record.get("target"))) is not None}
    reached = [record for record in records if number(record.get("steps_to_target")) is not None]
    if len(targets) != 1:
        result = f"{len(records)} arm{'s' * (len(records) != 1)} ran without a common target"
    elif not reached:
        result = f"None of {len(records)} arms reached the target of {targets.pop():.2f} held-out accuracy"
    else:
        fewest = min(record["steps_to_target"] for record in reached)
        first = [text(record.get("arm")) for record in reached if record["steps_to_target"] == fewest]
        result = f"{len(reached)} of {len(records)} arms reached the target of {targets.pop():.2f} held-out accuracy"
        steps = f"{fewest:g} step{'s' * (fewest != 1)}"
        who = _joined(first) if len(first) <= MOST_NAMED else f"{len(first)} of them"
        result += f", each after {steps}" if len(first) == len(reached) > 1 else f", {who} first, after {steps}"
    return result + (f"; not finished: {_joined(broken)}" if broken else "") + "."


def _joined(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _interval(records: Sequence[Record]) -> dict[str, float] | None:
    """Completions behind one accuracy and half the width of its 95 % interval at 0.5, if all arms agree on them."""
    evaluations = [(record.get("recipe") or {}).get("evaluation") or {} for record in records]
    counts = {(number(e.get("prompts")), number(e.get("samples"))) for e in evaluations if e}
    prompts, samples = counts.pop() if len(counts) == 1 else (None, None)
    if not prompts or not samples:
        return None
    return {"completions": prompts * samples, "half": 1.96 * math.sqrt(0.25 / (prompts * samples))}


def _curves(records: Sequence[Record]) -> dict[str, Any] | None:
    """The learning curves at two sizes, for a desk and for a phone; None if no arm was ever evaluated."""
    series = []
    for hue, record in enumerate(records):
        held_out, name = points(record, "eval_reward"), text(record.get("arm"))
        notes = [f"{name}, step {step:g}: {value:.3f}" for step, value in held_out]
        mark = " ✕" if record.get("status") in BROKEN else ""
        ring = number(record.get("steps_to_target"))
        line = plots.Series(name + mark, hue, held_out, notes, points(record, "train_reward"), ring)
        series += [line] if held_out else []
    if not series:
        return None
    target = next((value for record in records if (value := number(record.get("target"))) is not None), None)
    recipes = [record.get("recipe") or {} for record in records]
    batches = {(number(recipe.get("prompts")), number(recipe.get("group"))) for recipe in recipes if recipe}
    prompts, group = batches.pop() if len(batches) == 1 else (None, None)
    label = f"steps of {prompts * group:g} rollouts" if prompts and group else "steps"
    return {
        "wide": plots.learning_curves(series, target=target, x_label=label, size=WIDE),
        "narrow": plots.learning_curves(series, target=target, x_label=label, size=NARROW),
        "thin": any(line.thin for line in series),
        "ring": any(line.ring is not None for line in series),
        "broken": any(record.get("status") in BROKEN for record in records),
    }


def _by_value(records: Sequence[Record], values: Sequence[Any]) -> list[tuple[str, int, Any]]:
    """(names, place of the first, value) of arms with one value: arms on one base model share trace and spectrum."""
    kept: list[tuple[list[str], int, Any]] = []
    for place, (record, value) in enumerate(zip(records, values, strict=True)):
        same = next((names for names, _, other in kept if other == value), None)
        if same is not None:
            same.append(text(record.get("arm")))
        elif value:
            kept.append(([text(record.get("arm"))], place, value))
    return [(", ".join(names), place, value) for names, place, value in kept]


def _spectra(records: Sequence[Record]) -> dict[str, Any] | None:
    """Both panels of the recorded spectra and how many directions hold the stated share of each; None without any."""
    values = [[v for v in record.get("spectrum") or [] if number(v) is not None] for record in records]
    lines = [
        plots.Series(names, place, list(enumerate(spectrum, 1)))
        for names, place, spectrum in _by_value(records, values)
        if max(spectrum) > 0
    ]
    if not lines:
        return None
    notes = []
    for line in lines:
        shares = plots.cumulative_share([value for _, value in line.points])
        within = next(place for place, share in enumerate(shares, 1) if share >= ENERGY)
        notes.append({"arms": line.label, "hue": plots.hue_class(line.hue), "within": within, "of": len(shares)})
    return {
        "eigenvalues": plots.eigenvalue_chart(lines, size=PANEL),
        "cumulative": plots.cumulative_chart(lines, size=PANEL),
        "notes": notes,
        "energy": ENERGY,
    }


def _arm(record: Record, row: Mapping[str, str], *, facts: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    curve = [point for point in record.get("curve") or [] if number(point.get("step")) is not None]
    return {
        "row": row,
        "error": _error(record),
        "status": record.get("status") if record.get("status") in {"done", *BROKEN} else "unknown",
        "init": seconds(record.get("init_seconds")),
        "curve": [[figure(point.get(key), form) for key, form in CURVE_COLUMNS.items()] for point in curve],
        "facts": facts,
    }


def _error(record: Record) -> str | None:
    if record.get("error"):
        return text(record["error"])
    return UNEXPLAINED if record.get("status") == "failed" else None


def _facts(record: Record) -> dict[str, dict[str, str]]:
    """What identifies a run, as group -> key -> text: its arm, recipe, versions, hardware and source."""
    recipe = {key: value for key, value in (record.get("recipe") or {}).items() if key != "arms"}
    source = {key: record[key] for key in SOURCE if record.get(key) is not None}
    groups = {
        "arm": arm_settings(record),
        "recipe": recipe,
        "versions": record.get("versions") or {},
        "hardware": record.get("hardware") or {},
        "source": source,
    }
    return {group: dict(_flat(values)) for group, values in groups.items() if values}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _shared(facts: Sequence[Mapping[str, Mapping[str, str]]]) -> dict[str, dict[str, str]]:
    """The facts on which all arms that recorded their group agree; a single arm shares nothing."""
    shared: dict[str, dict[str, str]] = {}
    for group in ("recipe", "versions", "hardware", "source"):
        held = [fact[group] for fact in facts if group in fact]
        if len(held) > 1:
            shared[group] = {key: value for key, value in held[0].items() if all(h.get(key) == value for h in held)}
    return {group: values for group, values in shared.items() if values}


def _own(facts: Mapping[str, Mapping[str, str]], shared: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    own = {
        group: {key: value for key, value in values.items() if key not in shared.get(group, {})}
        for group, values in facts.items()
    }
    return {group: values for group, values in own.items() if values}
