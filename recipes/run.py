"""Runs a recipe: every arm in a process of its own, finished ones not again, and one report on top.

Decisions: a process per arm gives each its own peak memory and random state, and one crash leaves the others standing;
a record whose recipe (this arm, and everything the arms share) is the same is kept, anything else is run anew.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from forklora.recipes.config import Arm, Recipe
from forklora.recipes.files import write_json
from forklora.recipes.provenance import provenance
from forklora.recipes.report import read_arms, write_report

_SHARED = ("model", "task", "sampling", "prompts", "group", "steps", "target", "evaluation", "forks", "seed")


def run_recipe(recipe: Recipe, *, overwrite: bool = False) -> list[dict[str, Any]]:
    """Train all arms into ``recipe.output``; returns their records in the recipe's order, failed ones among them.

    Args:
        recipe: what to run.
        overwrite: run arms again that are done.
    """
    folder = Path(recipe.output)
    file = folder / "recipe.json"
    write_json(file, recipe.model_dump(mode="json"))
    try:
        for arm in recipe.arms:
            if overwrite or not is_done(recipe, arm):
                _run_arm(recipe, arm, file)
    finally:
        if any(folder.glob("*/record.json")):
            write_report(folder)
    records = {record["arm"]: record for record, _ in read_arms(folder)}
    return [records[arm.name] for arm in recipe.arms]


def _run_arm(recipe: Recipe, arm: Arm, file: Path) -> None:
    record = Path(recipe.output) / arm.name / "record.json"
    record.unlink(missing_ok=True)
    done = subprocess.run([sys.executable, "-m", "forklora.recipes.arm", str(file), arm.name], check=False)
    if not record.exists():
        # killed before it could say so itself, or it could not even start
        error = f"the arm's process ended with exit code {done.returncode} and left no record"
        shared = {"arm": arm.name, "task": recipe.task.name, "seed": recipe.seed, **provenance()}
        write_json(record, {**shared, "status": "failed", "error": error, "recipe": recipe.model_dump(mode="json")})


def is_done(recipe: Recipe, arm: Arm) -> bool:
    """Whether this arm has a finished record of the same recipe."""
    path = Path(recipe.output) / arm.name / "record.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(record, dict):
        return False
    now, then = recipe.model_dump(mode="json"), record.get("recipe") or {}
    mine = arm.model_dump(mode="json")
    same = all(now[key] == then.get(key) for key in _SHARED) and mine in (then.get("arms") or [])
    return record.get("status") == "done" and same
