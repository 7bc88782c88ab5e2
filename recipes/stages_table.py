"""The result of `forklora stages` as rows of one table for each base precision, and the failures by name."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

CAPTION = (
    "Each row is the worst of its cells (kinds of adapters and optimizers). outside: share of the update outside its "
    "bases. base, export, copies: base tensors that changed; adapter tensors missing in the saved file or not as "
    "trained; ranks whose copy of adapter or bases differs. reload: how far the logits of stock PEFT on the saved file "
    "are from the trained ones, relative to their size. curve: largest gap of a step's mean reward, and "
    "distance: of the update after five steps, relative to its size, both from the run without DeepSpeed in one "
    "process and one micro-batch (with as many ranks for collected bases)."
)
_NONE = "—"
_COUNTS = ("base", "export", "copies")
_NUMBERS = ("outside", "reload", "curve", "distance")


def stage_rows(result: Mapping[str, Any], dtype: str) -> list[dict[str, str]]:
    """One row for each stage, number of ranks and accumulation, in the order of the cells."""
    places: dict[tuple[Any, ...], list[Any]] = {}
    for entry in result["cells"]:
        cell = entry["cell"]
        if cell["dtype"] == dtype:
            places.setdefault((cell["stage"], cell["ranks"], cell["accumulation"]), []).append(entry)
    return [_row(place, entries) for place, entries in places.items()]


def _row(place: tuple[Any, ...], entries: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    stage, ranks, accumulation = place
    worst = {name: _worst(entries, name) for name in (*_NUMBERS, *_COUNTS)}
    failed = sum(bool(entry["failed"]) for entry in entries)
    return {
        "ZeRO": stage,
        "ranks": str(ranks),
        "micro-batches": str(accumulation),
        **{name: _NONE if worst[name] is None else f"{worst[name]:.1e}" for name in _NUMBERS},
        **{name: _NONE if worst[name] is None else str(worst[name]) for name in _COUNTS},
        "passed": f"{len(entries) - failed} of {len(entries)}",
    }


def _worst(entries: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [entry["measures"].get(name) for entry in entries]
    return max((value for value in values if value is not None), default=None)


def failed_cells(result: Mapping[str, Any]) -> Iterator[str]:
    """One line for each cell that failed, with the reasons."""
    for entry in result["cells"]:
        if entry["failed"]:
            yield f"{entry['name']}: {'; '.join(entry['failed'])}"
