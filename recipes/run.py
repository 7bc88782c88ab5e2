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
from forklora.recipes.options import Arm, ArmSpec
from forklora.recipes.provenance import provenance
from forklora.recipes.report import read_arms, write_report
from forklora.recipes.zero import deepspeed_settings
from pydantic import ValidationError

_SHARED = (
    "model", "task", "sampling", "prompts", "group", "steps", "target", "evaluation", "forks", "outcome", "part",
    "seed", "ranks",
)  # fmt: skip


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
    record_path(recipe, arm).unlink(missing_ok=True)
    try:
        code = run_ranks(recipe, [str(file), arm.name])
    except KeyboardInterrupt:
        interrupted = "KeyboardInterrupt: the arm was ended with the run"
        record_end(recipe, arm, status="interrupted", error=interrupted)
        raise
    # killed before it could say so itself, or it could not even start
    error = f"the arm's process ended with exit code {code} and left no record"
    record_end(recipe, arm, status="failed", error=error)


def record_path(recipe: Recipe, arm: ArmSpec) -> Path:
    """Where an arm's record stands."""
    return Path(recipe.output) / arm.name / "record.json"


def read_record(recipe: Recipe, arm: ArmSpec) -> dict[str, Any]:
    """An arm's record; empty where there is none that can be read."""
    try:
        record = json.loads(record_path(recipe, arm).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def record_end(recipe: Recipe, arm: Arm, *, status: str, error: str) -> None:
    """Write the record of an arm that left none."""
    if not record_path(recipe, arm).exists():
        shared = {"arm": arm.name, "task": recipe.task.name, "seed": recipe.seed, **provenance()}
        end = {"status": status, "error": error, "recipe": recipe.model_dump(mode="json")}
        write_json(record_path(recipe, arm), shared | end)


def is_done(recipe: Recipe, arm: Arm) -> bool:
    """Whether this arm has a finished record of the same recipe."""
    record = read_record(recipe, arm)
    if record.get("status") != "done":
        return False
    try:
        then = Recipe.model_validate(record.get("recipe"), strict=False)  # a record may be older than an option
    except ValidationError:
        return False
    same = all(getattr(recipe, key) == getattr(then, key) for key in _SHARED) and arm in then.arms
    # what the DeepSpeed configuration says counts, not what it is called
    return same and record.get("deepspeed") == deepspeed_settings(recipe.deepspeed)
