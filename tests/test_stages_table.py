"""The matrix as a table: worst values, failures by name."""

from forklora.recipes.stages_table import CAPTION, failed_cells, stage_rows


def entry(stage="2", *, dtype="float32", failed=(), **measures):
    cell = {"stage": stage, "ranks": 2, "accumulation": 4, "dtype": dtype, "kind": "span", "optimizer": "sgd"}
    return {"name": f"{stage}-{dtype}", "cell": cell, "measures": measures, "failed": list(failed)}


def test_a_row_holds_the_worst_of_its_cells_and_how_many_passed():
    result = {
        "cells": [
            entry(outside=1e-8, base=0, curve=None),
            entry(outside=3e-7, base=1, curve=0.5, failed=["base 1 is above 0", "curve 0.5 is above 1e-06"]),
            entry(failed=["rank 1: ValueError: no"]),
            entry("none", outside=2e-9),
            entry(dtype="bfloat16", outside=1.0),
        ]
    }
    rows = stage_rows(result, "float32")
    assert [(row["ZeRO"], row["ranks"], row["micro-batches"]) for row in rows] == [("2", "2", "4"), ("none", "2", "4")]
    assert [row["outside"] for row in rows] == ["3.0e-07", "2.0e-09"]
    assert [row["base"] for row in rows] == ["1", "—"]
    assert [row["curve"] for row in rows] == ["5.0e-01", "—"]
    assert [row["passed"] for row in rows] == ["1 of 3", "1 of 1"]
    assert all(heading in CAPTION for heading in ("outside", "base", "export", "copies", "reload", "curve", "distance"))
    assert list(failed_cells(result)) == [
        "2-float32: base 1 is above 0; curve 0.5 is above 1e-06",
        "2-float32: rank 1: ValueError: no",
    ]
