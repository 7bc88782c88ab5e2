"""The matrix run by its command: what is repeated, what a dying group costs, verdicts, and a part of it for real."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from forklora.recipes import stages, stages_group
from forklora.recipes.cli import main
from forklora.recipes.stages import check_stages, complaints, judged, run_cells
from forklora.recipes.stages_plan import LIMITS, load_stages
from safetensors.torch import load_file, save_file

# Stands in for the ranks of a group: finishes its cells one after another, except where it is told otherwise.
SCRIPT = """
import json, os, pathlib, sys, threading, time
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
spec, fates = json.loads(pathlib.Path(sys.argv[1]).read_text()), json.loads(sys.argv[2])
if fates.get("start"):
    sys.exit("cannot start")
for cell in spec["cells"]:
    folder = pathlib.Path(spec["output"], "cells", sys.argv[3] % cell)
    folder.mkdir(parents=True)
    fate = fates.get(cell["kind"])
    if fate == "die":
        (folder / "error-0.txt").write_text("rank 0: ValueError: no")
        sys.exit(1)
    if fate == "crash":
        print("noise"), print("the cause"), os._exit(3)
    if fate == "hang":
        time.sleep(60)
    (folder / "result.json").write_text(json.dumps({"cell": cell, "digest": spec["digest"], "failed": None}))
"""
NAME = "{stage}-%(ranks)s-%(dtype)s-%(accumulation)s-%(kind)s-%(optimizer)s"
FOUR = ["kinds=span,core,inputs,block", "optimizers=sgd", "dtypes=float32", "accumulation=1", "ranks=1"]


@pytest.fixture
def scripted(monkeypatch):
    """Groups are scripts; the value is what happens to which kind of cell. Starts are kept in ``started``."""
    fates, started = {}, []

    def command(stage, ranks, *, spec):
        started.append((stage, ranks))
        name = NAME.format(stage="none" if stage == "none" else f"zero{stage}")
        return [sys.executable, "-c", SCRIPT, str(spec), json.dumps(fates), name]

    monkeypatch.setattr(stages_group, "command", command)
    fates["started"] = started
    return fates


def results(output, cells):
    found = [json.loads((cell.folder(output) / "result.json").read_text()) for cell in cells]
    assert all(one["digest"] == "d" for one in found)
    return {cell.kind: one["failed"] for cell, one in zip(cells, found, strict=True)}


def test_groups_share_processes_by_stage_and_ranks(scripted, tmp_path):
    cells = load_stages(["dtypes=float32", "kinds=span", "optimizers=sgd"]).cells
    run_cells(cells, tmp_path, digest="d", processes=2)
    assert sorted(scripted["started"]) == sorted((stage, ranks) for stage in ("none", *"0123") for ranks in (1, 2))
    assert results(tmp_path, cells) == {"span": None}


def test_a_group_that_dies_costs_one_cell_and_names_the_cause(scripted, tmp_path):
    cells = load_stages([*FOUR, "stages=2"]).cells
    scripted |= {"core": "die", "block": "crash"}
    run_cells(cells, tmp_path, digest="d", processes=1)
    assert scripted["started"] == [("2", 1)] * 2
    assert results(tmp_path, cells) == {
        "span": None, "inputs": None, "core": "rank 0: ValueError: no",
        "block": "no word from a rank; last in the log: the cause",
    }  # fmt: skip


def test_a_group_that_cannot_start_is_started_once(scripted, tmp_path):
    cells = load_stages([*FOUR, "stages=2"]).cells
    scripted["start"] = True
    run_cells(cells, tmp_path, digest="d", processes=1)
    assert len(scripted["started"]) == 1
    assert {*results(tmp_path, cells).values()} == {"no word from a rank; last in the log: cannot start"}


def test_ranks_that_wait_for_each_other_are_ended(scripted, tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "PATIENCE", 1.0)
    cells = load_stages([*FOUR, "stages=2"]).cells
    scripted["inputs"] = "hang"
    run_cells(cells, tmp_path, digest="d", processes=1)
    found = results(tmp_path, cells)
    assert found.pop("inputs") == "no result within 1 s (ranks that wait for each other?)"
    assert {*found.values()} == {None}
    assert not alive(tmp_path)


def alive(folder):
    """Command lines of processes that name a folder."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line and int(file.parent.name) != os.getpid():
            found.append(line)
    return found


def test_an_interruption_leaves_no_process_and_keeps_what_is_finished(scripted, tmp_path, monkeypatch):
    cells = load_stages([*FOUR, "stages=none,2"]).cells
    scripted["inputs"] = "hang"

    def watch(group):
        if (cells[-2].folder(tmp_path)).exists():  # that one hangs
            assert alive(tmp_path)
            raise KeyboardInterrupt
        return group.finished() and None, 0

    monkeypatch.setattr(stages, "_watch", watch)
    with pytest.raises(KeyboardInterrupt):
        run_cells(cells, tmp_path, digest="d", processes=2)
    assert not alive(tmp_path)
    assert (cells[-4].folder(tmp_path) / "result.json").exists()


def test_what_is_above_its_limit_or_unknown_is_named():
    inside = {name: limit.float32 for name, limit in LIMITS.items()}
    assert complaints(inside, dtype="float32") == []
    assert complaints(inside | {"outside": 2e-6, "curve": None}, dtype="float32") == [
        "outside 2e-06 is above 1e-06", "curve could not be found",
    ]  # fmt: skip
    assert complaints(inside | {"outside": 2e-6}, dtype="bfloat16") == []
    assert complaints(inside | {"distance": float("nan")}, dtype="float32") == ["distance nan is above 1e-05"]


def test_deepspeed_is_asked_for_before_anything_starts(monkeypatch):
    monkeypatch.setattr(stages.importlib.util, "find_spec", lambda name: None)
    check_stages(load_stages(["stages=none", "ranks=1"]))
    for overrides in (["stages=none", "ranks=2"], ["stages=1", "ranks=1"]):
        with pytest.raises(stages.Refusal, match=r"forklora\[deepspeed\]"):
            check_stages(load_stages(overrides))


PART = ["dtypes=float32", "accumulation=1", "kinds=block", "optimizers=length", "stages=3", "ranks=2"]


@pytest.mark.slow
def test_a_part_for_real_is_inside_its_span_equals_its_reference_and_is_not_run_twice(tmp_path, capsys):
    asked = ["stages", *PART, f"output={tmp_path}"]
    assert main(asked) == 0, capsys.readouterr().err
    result = json.loads((tmp_path / "stages.json").read_text())
    assert [entry["failed"] for entry in result["cells"]] == [[]]
    for entry in result["cells"]:
        assert entry["measures"].keys() == LIMITS.keys()
        assert len(entry["rewards"]) == 5 and len({*entry["rewards"]}) > 1
    assert "1 of 1" in capsys.readouterr().out
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("cells/*/result.json")}
    assert len(written) == 2
    assert main(asked) == 0
    assert written == {path: path.stat().st_mtime_ns for path in tmp_path.glob("cells/*/result.json")}
    # the verdict comes from what was saved: an adapter that leaves its span, or is another one, is found out
    cell = load_stages(PART).cells[0]
    file = cell.folder(tmp_path) / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "lora_B" in name)
    save_file({**tensors, name: tensors[name] + 0.01 * torch.randn_like(tensors[name])}, file)
    said = " ".join(judged(cell, tmp_path)["failed"])
    assert "outside" in said and "distance" in said
    assert main(asked) == 1
    assert f"forklora: {cell.name}: " in capsys.readouterr().err


@pytest.mark.slow
def test_a_larger_part_for_real(tmp_path, capsys):
    part = ["kinds=span,inputs,collected", "optimizers=sgd,adamw,length,kl", "accumulation=1,4", "ranks=1,2"]
    assert main(["stages", *part, "stages=2,3", "dtypes=float32", f"output={tmp_path}"]) == 0, capsys.readouterr().err


@pytest.mark.slow
def test_ranks_end_with_their_parent_however_it_ends(tmp_path):
    arguments = ["stages", *PART, f"output={tmp_path}"]
    code = f"import sys; from forklora.recipes.cli import main; sys.exit(main({arguments!r}))"
    parent = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 120
    while not any("stages_side" in line for line in alive(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(8)  # imports are over, training may have begun
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 30
    while alive(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not alive(tmp_path)
