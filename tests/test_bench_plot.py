"""The tables and the plot of a benchmark say what its numbers say."""

import re

import pytest
from forklora.recipes.bench import ratios
from forklora.recipes.bench_plan import read_shape
from forklora.recipes.bench_plot import bench_plot
from forklora.recipes.bench_table import failures, growth_rows, shape_rows


def step(seconds, *, sampling=0.5, scoring=0.25, peak=100.0):
    update = seconds - sampling - scoring
    return {"seconds": seconds, "sampling": sampling, "scoring": scoring, "update": update, "peak_mib": peak}


def side(*seconds, peak=100.0, failed=None):
    return {"steps": [step(s, peak=peak) for s in seconds], "peak_mib": peak, "failed": failed}


def result_of(*, growth=(1.0, 1.5, 2.0)):
    shape = read_shape("64/64/8").model_dump()
    theirs, ours = side(4.0, 9.0, peak=300.0), side(2.0, 3.0, peak=200.0)
    done = {"shape": shape, "trl": theirs, "ours": ours, "ratios": ratios(theirs, ours)}
    dead = {"shape": shape, "trl": side(failed="killed by SIGKILL"), "ours": ours, "ratios": {}}
    grown = [
        {"family": "vocabulary", "factor": 2.0**i, "shape": shape, "ours": side(2 * s)} for i, s in enumerate(growth)
    ]
    return {"shapes": [done, dead], "growth": grown}


def test_the_tables_say_what_the_numbers_say():
    done, dead = shape_rows(result_of())
    assert done == {
        "shape": "64/64/8/4/32", "TRL s": "6.50", "ours s": "2.50", "ratio": "2.50 (2.00–3.00)",
        "update": f"{(3.25 / 1.25 + 8.25 / 2.25) / 2:.2f} (2.60–3.67)", "TRL MiB": "300", "ours MiB": "200",
        "memory": "1.50",
    }  # fmt: skip
    assert (dead["TRL s"], dead["ours s"], dead["ratio"]) == ("failed", "2.50", "—")
    assert failures(result_of()) == ["shape 64/64/8/4/32, trl: killed by SIGKILL"]
    rows = growth_rows(result_of())
    assert [(row["factor"], row["seconds"], row["times the first"]) for row in rows] == [
        ("1", "2.00", "1.00"), ("2", "3.00", "1.50"), ("4", "4.00", "2.00"),
    ]  # fmt: skip


def test_the_plot_draws_bars_to_the_height_of_their_ratios():
    drawn = bench_plot(result_of())
    grid = {float(v): float(y) for y, v in re.findall(r'class="grid" d="M\S+ (\S+?)H.*?>([\d.]+)</text>', drawn)}
    unit = (grid[0.0] - grid[1.0]) / 1
    bars = re.findall(r'<rect class="h(\d)" x="[^"]*" y="([^"]*)" width="[^"]*" height="([^"]*)"', drawn)[3:]
    heights = [float(height) / unit for _, _, height in bars]
    assert heights == pytest.approx([2.5, 3.13, 1.5], abs=0.02)
    assert "TRL failed" in drawn and "vocabulary" in drawn and "proportional" in drawn
    alone = bench_plot(result_of(growth=()))
    assert "proportional" not in alone
    assert bench_plot({"shapes": [result_of()["shapes"][1]], "growth": []}).startswith("<svg xmlns")
