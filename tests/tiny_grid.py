"""A comparison of two arms on a tiny saved policy, and records that stand where its runs' would."""

from itertools import chain, product
from pathlib import Path

from forklora.recipes.files import write_json
from forklora.recipes.grid import Grid
from forklora.recipes.rounds import rounds
from forklora.recipes.run import record_path

from tiny_policy import recipe_of

TRIALS = [{"steps": 1, "keep": 2}, {"steps": 2, "keep": 1}]


def grid_of(folder, **changes):
    """Two arms, three rates, one task, two steps, on a tiny saved policy."""
    recipe = recipe_of(folder)
    content = {
        "name": "tiny", "description": "Two arms.", "model": recipe.model.model_dump(),
        "tasks": [{"name": "products", "task": {"name": "multiplication", "options": {}}, "target": 1.0}],
        "sampling": {"max_new_tokens": 5, "stop": ["\n"]}, "prompts": 2, "group": 4, "steps": 2, "seeds": [0],
        "trials": TRIALS, "choosing": {"prompts": 3, "samples": 2},
        "evaluation": {"every": 1, "prompts": 3, "samples": 2}, "outcome": {"samples": 2, "kl_prompts": 2},
        "forks": {"prompts": 4}, "baseline": "plain",
        "arms": [
            {"name": "plain", "adapter": "lora", "optimizer": "adamw", "rates": [0.001, 0.01, 0.1]},
            {"name": "ours", "adapter": "block", "rates": [0.01, 0.1, 1.0]},
        ],
        "output": str(folder / "grid"),
    }  # fmt: skip
    return Grid.model_validate(content | changes)


def put(recipe, status="done", accuracy=0.0):
    """A record that stands where this run's would."""
    content = {"status": status, "recipe": recipe.model_dump(mode="json"), "deepspeed": None}
    write_json(record_path(recipe, recipe.arms[0]), content | {"eval_reward_final": accuracy})


def outcome_of(accuracy):
    """What is measured at the end, around an accuracy."""
    return {
        "prompts": 4, "samples": 2, "accuracy": accuracy, "pass_at": {"1": accuracy, "2": (1 + accuracy) / 2},
        "kl_to_base": 0.25, "text_loss_base": 3.0, "text_loss": 3.125, "untrained_task": "addition",
        "untrained_base": 0.5, "untrained": 0.375,
        "update": {"changed_share": 0.5, "stable_rank": 1.5, "top16_energy": 1.0, "norm": 2.0},
    }  # fmt: skip


def whole_record(recipe, accuracy, *, reached=None):
    """A finished record with every figure: two evaluations, 100 seconds of training after 8 of initialization."""
    arm = recipe.arms[0]
    spent = 16 if arm.adapter != "lora" else 0
    curve = [
        {"step": 0, "rollouts": spent, "seconds": 8.0, "train_reward": None, "eval_reward": 0.2},
        {"step": recipe.steps, "rollouts": spent + 8, "seconds": 108.0, "train_reward": 0.3, "eval_reward": accuracy},
    ]
    last = recipe.part.round == "report"
    return {
        "status": "done", "error": None, "arm": arm.name, "task": recipe.task.name, "seed": recipe.seed, "ranks": 1,
        "recipe": recipe.model_dump(mode="json"), "deepspeed": None, "commit": "c" * 40, "dirty": False,
        "versions": {"torch": "2"}, "hardware": {"processor": "one", "cores": 2}, "curve": curve,
        "init_seconds": 8.0, "evaluation_seconds": 3.0, "total_seconds": 120.0, "target": recipe.target,
        "steps_to_target": reached, "rollouts_to_target": reached and spent + 8 * reached,
        "seconds_to_target": reached and 8.0 + 10 * reached, "eval_reward_start": 0.2, "eval_reward_final": accuracy,
        "trained_parameters": 100 if arm.adapter == "lora" else 10, "adapter_bytes": 4096,
        "peak_memory_bytes": 2**30, "step0_hash": "a" * 64, "base_hash": "b" * 64, "spectrum": None,
        "outcome": outcome_of(accuracy) if last else None,
    }  # fmt: skip


def fill(grid, accuracy, *, reached=None):
    """Write every record of a comparison; ``accuracy(recipe)`` and ``reached(recipe)`` say what came out."""
    for task, arm in product(grid.tasks, grid.arms):
        for recipe in chain.from_iterable(rounds(grid, task=task, arm=arm)):
            steps = None if reached is None else reached(recipe)
            record = whole_record(recipe, accuracy(recipe), reached=steps)
            write_json(record_path(recipe, recipe.arms[0]), record)
    write_json(Path(grid.output) / "grid.json", grid.model_dump(mode="json"))
