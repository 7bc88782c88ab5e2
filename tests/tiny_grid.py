"""A comparison of two arms on a tiny saved policy, and records that stand where its runs' would."""

from forklora.recipes.files import write_json
from forklora.recipes.grid import Grid
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
