"""Records of arms into the one table that the command line, the README and the report all show.

A missing value stays missing and is shown as an em dash; a failed or interrupted arm is a row like any other, with its
error.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forklora.recipes.forkmap import visible

Record = Mapping[str, Any]
MISSING = "—"
PROSE = "\n "
TEXT_COLUMNS = {"arm", "adapter", "optimizer", "status", "error"}


def summary_table(records: Sequence[Record]) -> list[dict[str, str]]:
    """One row per record, in the given order: column heading -> text ready to show; missing values are em dashes.

    Accuracy is held-out accuracy from start to end; seconds count from the start of the arm, initialization included.
    """
    return [{heading: show(record) for heading, show in _COLUMNS.items()} for record in records]


def summary_markdown(records: Sequence[Record]) -> str:
    """The summary table as Markdown; the error column only where some arm has an error; no records give no text."""
    if not records:
        return ""
    rows = summary_table(records)
    headings = [key for key in rows[0] if key != "error" or any(row[key] != MISSING for row in rows)]
    lines = [headings, ["---" if key in TEXT_COLUMNS else "---:" for key in headings]]
    lines += [[row[key].replace("|", "\\|").replace("\n", " ") for key in headings] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def number(value: object) -> float | None:
    """The value if it is a finite number, else None: a diverged run's NaN is a missing value, not a figure."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def figure(value: object, form: str = ".3f", *, unit: int = 1) -> str:
    """The number in units of `unit`, formatted; an em dash where it is missing."""
    known = number(value)
    return MISSING if known is None else format(known / unit if unit != 1 else known, form)


def seconds(value: object) -> str:
    """A duration in seconds: one decimal below ten, whole above."""
    known = number(value)
    return figure(value, ".1f" if known is not None and known < 10 else ",.0f")


def text(value: object) -> str:
    """The value as text with control characters made visible; an em dash where it is missing."""
    return MISSING if value is None or value == "" else visible(str(value), keep=PROSE)


def arm_settings(record: Record) -> Record:
    """The arm's own entry in the resolved recipe; empty if the record has none."""
    arms = (record.get("recipe") or {}).get("arms") or []
    return next((arm for arm in arms if arm.get("name") == record.get("arm")), {})


def points(record: Record, key: str) -> list[tuple[float, float]]:
    """(step, value) of every point of the learning curve that has this value."""
    pairs = [(number(point.get("step")), number(point.get(key))) for point in record.get("curve") or []]
    return [(step, value) for step, value in pairs if step is not None and value is not None]


def _adapter(record: Record) -> str:
    arm = arm_settings(record)
    sizes = [f"{key} {arm[key]}" for key in ("rank", "width") if arm.get(key) is not None]
    return ", ".join([text(arm.get("adapter")), *sizes, *(["trained basis"] if arm.get("train_basis") else [])])


def _optimizer(record: Record) -> str:
    arm = arm_settings(record)
    rate = number(arm.get("rate"))
    return text(arm.get("optimizer")) + ("" if rate is None else f" {rate:g}")


def _accuracy(record: Record) -> str:
    start, end = figure(record.get("eval_reward_start")), figure(record.get("eval_reward_final"))
    return MISSING if start == end == MISSING else f"{start} → {end}"


def _total_seconds(record: Record) -> str:
    return seconds(max((value for _, value in points(record, "seconds")), default=None))


_COLUMNS: dict[str, Callable[[Record], str]] = {
    "arm": lambda record: text(record.get("arm")),
    "adapter": _adapter,
    "optimizer": _optimizer,
    "trained parameters": lambda record: figure(record.get("trained_parameters"), ",.0f"),
    "accuracy start → end": _accuracy,
    "steps to target": lambda record: figure(record.get("steps_to_target"), ",.0f"),
    "rollouts to target": lambda record: figure(record.get("rollouts_to_target"), ",.0f"),
    "seconds to target": lambda record: seconds(record.get("seconds_to_target")),
    "seconds in total": _total_seconds,
    "peak memory MiB": lambda record: figure(record.get("peak_memory_bytes"), ",.0f", unit=2**20),
    "adapter size KiB": lambda record: figure(record.get("adapter_bytes"), ",.1f", unit=2**10),
    "status": lambda record: text(record.get("status")),
    "error": lambda record: text(record.get("error")),
}
