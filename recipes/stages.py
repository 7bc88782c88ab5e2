"""Runs the matrix of `forklora stages` in real processes, resumable, and holds every cell against its reference.

Decisions: one group of processes for each stage and number of ranks, since a start costs more than a cell; groups run
beside each other as cores allow; a cell is repeated when it failed or when code or versions have changed; a group that
dies or falls silent costs the cell it was at, and the rest goes on in a new one.

    forklora stages stages=0,3 ranks=2 kinds=span optimizers=sgd dtypes=float32 accumulation=1
"""

import contextlib
import hashlib
import importlib.util
import itertools
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forklora.recipes.files import write_json
from forklora.recipes.provenance import provenance
from forklora.recipes.refusal import Refusal
from forklora.recipes.stages_group import CellGroup
from forklora.recipes.stages_inputs import prepare_inputs
from forklora.recipes.stages_measure import distance, largest_gap, saved_update, worst_outside
from forklora.recipes.stages_plan import ADAPTERS, LIMITS, Cell, StagesPlan
from tqdm.auto import tqdm

from forklora.adapter import ForkLoraConfig
from forklora.bases import Bases

PATIENCE = 240.0  # seconds without a finished cell after which a group counts as hanging
_SOURCES = ("*.py", "../trainers/*.py", "../forklora/*.py", "deepspeed/*.json")


def run_stages(plan: StagesPlan, *, overwrite: bool = False) -> dict[str, Any]:
    """Run the cells of the plan that are not done yet; returns what stages.json holds, failed cells among it.

    Args:
        plan: which cells.
        overwrite: run cells again that are done.
    """
    output = Path(plan.output).absolute()
    found = provenance()
    digest = _digest(found["versions"])
    if overwrite or not _of(digest, output / "inputs.json"):
        prepare_inputs(output)
        write_json(output / "inputs.json", {"digest": digest})
    waiting = [cell for cell in plan.needed if overwrite or not _done(cell, output, digest=digest)]
    singles = [cell for cell in waiting if cell == cell.single]  # others may learn from what they have drawn
    for part in (singles, [cell for cell in waiting if cell != cell.single]):
        if part:
            run_cells(part, output, digest=digest, processes=plan.processes or os.cpu_count() or 1)
    entries = [judged(cell, output) for cell in plan.cells]
    limits = {name: limit._asdict() for name, limit in LIMITS.items()}
    result = {"plan": plan.model_dump(mode="json"), **found, "limits": limits, "cells": entries}
    write_json(output / "stages.json", result)
    return result


def check_stages(plan: StagesPlan) -> None:
    """Raise a Refusal where DeepSpeed is needed and not there."""
    needed = any(cell.stage != "none" or cell.ranks > 1 for cell in plan.needed)
    if needed and importlib.util.find_spec("deepspeed") is None:
        raise Refusal('these cells need DeepSpeed, whose launcher starts them; pip install "forklora[deepspeed]"')


def _digest(versions: dict[str, Any]) -> str:
    """Of all code and data that a cell runs, and of the versions beneath."""
    here, digest = Path(__file__).parent, hashlib.sha256(json.dumps(versions, sort_keys=True).encode())
    for file in sorted(itertools.chain.from_iterable(here.glob(pattern) for pattern in _SOURCES)):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _of(digest: str, file: Path) -> bool:
    return _read(file).get("digest") == digest


def _done(cell: Cell, output: Path, *, digest: str) -> bool:
    file = cell.folder(output) / "result.json"
    return _of(digest, file) and _read(file).get("failed") is None


def run_cells(cells: Sequence[Cell], output: Path, *, digest: str, processes: int) -> None:
    """Run cells in groups, as many beside each other as fit; each leaves a result.json in its folder, failed or not."""
    kept = {(cell.ranks, cell.stage): [] for cell in cells}
    for cell in cells:
        kept[cell.ranks, cell.stage].append(cell)
    waiting = [kept[key] for key in sorted(kept, key=lambda key: (key[0], key[1] != "none", key[1]))]
    running: dict[CellGroup, contextlib.ExitStack] = {}
    with contextlib.ExitStack() as every, tqdm(total=len(cells), unit="cell", desc="stages") as bar:
        while waiting or running:
            busy = sum(group.ranks for group in running)
            if waiting and (not running or busy + waiting[0][0].ranks <= processes):
                own = every.enter_context(contextlib.ExitStack())
                group = own.enter_context(CellGroup(waiting.pop(0), output=output, digest=digest))
                running[group] = own
                continue
            time.sleep(0.2)
            looks = [(group, *_watch(group)) for group in running]
            bar.set_postfix_str(", ".join(g.cells[0].name for g in running if g.cells), refresh=False)
            bar.update(sum(done for _, _, done in looks))
            over = [(group, left) for group, left, _ in looks if left is not None]
            for group, _ in over:
                running.pop(group).close()
            waiting = [*(left for _, left in over if left), *waiting]


def _watch(group: CellGroup) -> tuple[list[Cell] | None, int]:
    """What is left of a group that is over (None while it runs), and how many cells are done since the last look."""
    ended = group.ended  # before its results are counted, or a last one could be missed
    done = group.finished()
    if not ended and group.silence < PATIENCE:
        return None, done
    if not group.cells:
        return [], done
    blamed, reason = group.blamed()
    reason = reason if ended else f"no result within {PATIENCE:.0f} s (ranks that wait for each other?)"
    for cell in blamed:
        content = {"cell": cell.model_dump(mode="json"), "digest": group.digest, "failed": reason}
        write_json(cell.folder(group.output) / "result.json", content)
    return group.cells[len(blamed) :], done + len(blamed)


def judged(cell: Cell, output: Path) -> dict[str, Any]:
    """A cell's measures, and the reasons why it fails; it passes where there are none."""
    found = _read(cell.folder(output) / "result.json")
    entry = {"name": cell.name, "cell": cell.model_dump(mode="json"), "seconds": found.get("seconds")}
    if found.get("failed", "no result"):
        return entry | {"measures": {}, "failed": [found.get("failed", "no result")]}
    measures = found["measures"] | {"outside": _outside(cell, output)}
    failed = []
    single = _read(cell.single.folder(output) / "result.json")
    if single.get("failed", "no result"):
        failed.append(f"what it is held against failed: {cell.single.name}")
    else:
        updates = [saved_update(one.folder(output) / "adapter") for one in (cell, cell.single)]
        measures |= {"distance": distance(*updates), "curve": largest_gap(found["rewards"], single["rewards"])}
    failed += complaints(measures, dtype=cell.dtype)
    return entry | {"rewards": found["rewards"], "measures": measures, "failed": failed}


def complaints(measures: dict[str, float | None], *, dtype: str) -> list[str]:
    """One line for each measure above its limit, or without a value."""
    limits = {name: getattr(LIMITS[name], dtype) for name in measures}
    return [
        f"{name} {'could not be found' if value is None else f'{value:.3g} is above {limits[name]:.3g}'}"
        for name, value in measures.items()
        if value is None or not value <= limits[name]
    ]


def _outside(cell: Cell, output: Path) -> float | None:
    folder = cell.folder(output)
    bases = Bases.load((folder if cell.kind == "collected" else output) / "bases.safetensors")
    return worst_outside(saved_update(folder / "adapter"), bases, config=ForkLoraConfig(**ADAPTERS[cell.kind]))
