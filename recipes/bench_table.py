"""The result of a benchmark as rows of two tables, and what a reader has to know beside them."""

import statistics
from collections.abc import Mapping
from typing import Any

CAPTION = (
    "A shape is prompt tokens/completion tokens/group/prompts/rows of a micro-batch. Seconds are those of one step, "
    "optimizer included, the median of the timed ones. Ratios are TRL's over ours, with the lowest and highest of the "
    "pairs of steps; update is forward and backward passes with the optimizer; memory is the peak of each side's "
    "process. Ours runs on random bases: a step costs the same whatever they are, and collecting real ones is paid "
    "once and is no part of a step. Every row has a signal, so nothing is gained by skipping rows."
)
_NONE = "—"


def shape_rows(result: Mapping[str, Any]) -> list[dict[str, str]]:
    """One row for each shape."""
    return [_shape_row(entry) for entry in result["shapes"]]


def _shape_row(entry: Mapping[str, Any]) -> dict[str, str]:
    shape, found = entry["shape"], entry["ratios"]
    return {
        "shape": "/".join(str(shape[key]) for key in ("prompt", "completion", "group", "prompts", "rows")),
        "TRL s": seconds(entry["trl"]),
        "ours s": seconds(entry["ours"]),
        "ratio": _spread(found.get("step")),
        "update": _spread(found.get("update")),
        "TRL MiB": _mebibytes(entry["trl"]),
        "ours MiB": _mebibytes(entry["ours"]),
        "memory": f"{found['memory']['median']:.2f}" if found else _NONE,
    }


def growth_rows(result: Mapping[str, Any]) -> list[dict[str, str]]:
    """One row for each point of growth: its seconds, in all and relative to the first point of its family."""
    relative = {id(entry): value for _, curve in growth_curves(result) for entry, value in curve}
    return [
        {
            "grown": entry["family"],
            "factor": f"{entry['factor']:.3g}",
            "seconds": seconds(entry["ours"]),
            "times the first": f"{relative[id(entry)]:.2f}" if id(entry) in relative else _NONE,
            "MiB": _mebibytes(entry["ours"]),
        }
        for entry in result["growth"]
    ]


def growth_curves(result: Mapping[str, Any]) -> list[tuple[str, list[tuple[Any, float]]]]:
    """Family -> its entries with their median seconds over those of factor 1; a family without that one is left out."""
    curves = []
    for family in dict.fromkeys(entry["family"] for entry in result["growth"]):
        known = [e for e in result["growth"] if e["family"] == family and not e["ours"]["failed"]]
        first = next((_median(entry["ours"]) for entry in known if entry["factor"] == 1), None)
        curves += [(family, [(entry, _median(entry["ours"]) / first) for entry in known])] if first else []
    return curves


def failures(result: Mapping[str, Any]) -> list[str]:
    """One line for each side that failed."""
    return [
        f"{entry.get('family', 'shape')} {'/'.join(str(n) for n in entry['shape'].values())}, {side}: {error}"
        for entry in (*result["shapes"], *result["growth"])
        for side in ("trl", "ours")
        if (error := entry.get(side, {}).get("failed"))
    ]


def seconds(side: Mapping[str, Any]) -> str:
    """Median seconds of a side's timed steps, or that it failed."""
    return "failed" if side["failed"] else f"{_median(side):.2f}"


def _median(side: Mapping[str, Any]) -> float:
    return statistics.median(step["seconds"] for step in side["steps"])


def _mebibytes(side: Mapping[str, Any]) -> str:
    return f"{side['peak_mib']:,.0f}" if side["peak_mib"] else _NONE


def _spread(found: Mapping[str, float] | None) -> str:
    return f"{found['median']:.2f} ({found['low']:.2f}–{found['high']:.2f})" if found else _NONE
