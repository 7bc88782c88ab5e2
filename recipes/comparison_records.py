"""Reads one record into a run: a figure that is not finite is missing, a record of another shape is unreadable.

Decisions: records come from interrupted machines and older versions; whatever they hold, they end as a run with a
status and an error, so that one bad file is a line of the report instead of its end.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forklora.recipes.comparison_parts import Run
from forklora.recipes.config import Recipe
from forklora.recipes.run import read_record, record_path
from forklora.recipes.summary import Record, number

MISSING, UNREADABLE, DONE = "missing", "unreadable", "done"
_SHAPES = {
    "status": str, "error": str, "curve": list, "outcome": dict, "hardware": dict, "versions": dict, "commit": str,
    "step0_hash": str, "base_hash": str,
}  # fmt: skip
_OUTCOME_SHAPES = {"pass_at": dict, "update": dict}


def read_run(recipe: Recipe, *, folder: Path) -> Run:
    """The run of a recipe with its one arm, as its record below a comparison's folder tells it."""
    arm = recipe.arms[0]
    path = record_path(recipe, arm)
    record = _finite(read_record(recipe, arm))
    status, error = _state(record, found=path.exists())
    record = {} if status == UNREADABLE else record
    return Run(
        task=recipe.part.task if recipe.part else "",
        round=recipe.part.round if recipe.part else "",
        arm=arm.name,
        rate=arm.rate,
        seed=recipe.seed,
        status=status,
        error=error,
        accuracy_start=number(record.get("eval_reward_start")),
        accuracy_final=number(record.get("eval_reward_final")),
        seconds=number(record.get("total_seconds")),
        path=str(path.relative_to(folder)),
        record=record,
    )


def _state(record: Record, *, found: bool) -> tuple[str, str | None]:
    """Status, with what is wrong."""
    if not found:
        return MISSING, "there is no record"
    if not record:
        return UNREADABLE, "the record is empty or no JSON object"
    if wrong := list(_misshapen(record)):
        return UNREADABLE, f"the record is of another shape: {', '.join(wrong)}"
    status = record.get("status")
    if status is None:
        return UNREADABLE, "the record has no status"
    return status, None if status == DONE else record.get("error") or f"the record says {status} and no more"


def _misshapen(record: Record) -> Iterator[str]:
    groups = [("", record, _SHAPES)]
    if isinstance(record.get("outcome"), dict):
        groups.append(("outcome.", record["outcome"], _OUTCOME_SHAPES))
    for prefix, group, shapes in groups:
        for key, kind in shapes.items():
            value = group.get(key)
            if value is not None and not isinstance(value, kind):
                yield f"{prefix}{key} is a {type(value).__name__}"
    curve = record.get("curve")
    if isinstance(curve, list) and not all(isinstance(point, dict) for point in curve):
        yield "curve has points that are no objects"


def _finite(value: Any) -> Any:  # noqa: ANN401 - JSON
    """The value with None for each number that is not finite."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
