"""Runs a recipe: every arm in processes of its own, finished ones not again, and one report on top.

Decisions: own processes give each arm its own peak memory and random state, and one crash leaves the others standing;
a record whose recipe (this arm, and everything the arms share) is the same is kept, anything else is run anew.
"""

import json
from pathlib import Path
from typing import Any

from forklora.recipes.config import Recipe
from forklora.recipes.files import write_json
from forklora.recipes.launch import run_ranks
from forklora.recipes.options import Arm
from forklora.recipes.provenance import provenance
from forklora.recipes.report import read_arms, write_report
from forklora.recipes.zero import deepspeed_settings

_SHARED = ("model", "task", "sampling", "prompts", "group", "steps", "target", "evaluation", "forks", "seed", "ranks")
_EARLIER = {"ranks": 1}  # what a record means that was written before there was such a key


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
    try:
        code = run_ranks(recipe, [str(file), arm.name])
    except KeyboardInterrupt:
        _record_end(recipe, arm, "interrupted", "KeyboardInterrupt: the arm was ended with the run")
        raise
    # killed before it could say so itself, or it could not even start
    _record_end(recipe, arm, "failed", f"the arm's process ended with exit code {code} and left no record")


def _record_end(recipe: Recipe, arm: Arm, status: str, error: str) -> None:
    """The record of an arm that left none."""
    path = Path(recipe.output) / arm.name / "record.json"
    if not path.exists():
        shared = {"arm": arm.name, "task": recipe.task.name, "seed": recipe.seed, **provenance()}
        write_json(path, {**shared, "status": status, "error": error, "recipe": recipe.model_dump(mode="json")})


def is_done(recipe: Recipe, arm: Arm) -> bool:
    """Whether this arm has a finished record of the same recipe."""
    path = Path(recipe.output) / arm.name / "record.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(record, dict):
        return False
    now, then = recipe.model_dump(mode="json"), _EARLIER | (record.get("recipe") or {})
    mine = arm.model_dump(mode="json")
    same = all(now[key] == then.get(key) for key in _SHARED) and mine in (then.get("arms") or [])
    # what the DeepSpeed configuration says counts, not what it is called
    same = same and record.get("deepspeed") == deepspeed_settings(recipe.deepspeed)
    return record.get("status") == "done" and same
