"""A contrast has rates for every arm, a teacher before its students, and recipes that train the model's weights."""

import pytest
from forklora.recipes.contrast_plan import load_contrast
from forklora.recipes.refusal import Refusal


def test_a_teacher_comes_before_its_students_whatever_the_order_given():
    plan = load_contrast(["ways=sft,distill,rl", "rates.rl-adamw=[0.1, 0.2]"])
    ways = [run.way for run in plan.runs]
    assert ways == sorted(ways, key=["rl", "distill", "sft"].index)
    assert [run.name for run in plan.runs][:2] == ["rl-adamw-0.1", "rl-adamw-0.2"]
    assert len({run.name for run in plan.runs}) == len(plan.runs)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["ways=distill"], "distill learns from the best rl-adamw run"),
        (["optimizers=sgd"], "distill learns from the best rl-adamw run"),
        (["ways=rl", "rates={rl-adamw: []}"], "no rates for rl-adamw"),
        (["ways=rl", "rates.rl-adam=[0.1]"], "rl-adam, which are no arms"),
        (["ways=rlhf"], "ways"),
        (["task.name=adition"], "addition"),
        (["stepps=3"], "did you mean 'steps'"),
    ],
)
def test_what_cannot_run_is_named(overrides, says):
    with pytest.raises(Refusal, match=says):
        load_contrast(overrides)


def test_a_run_is_a_recipe_of_one_arm_that_trains_all_linear_weights():
    plan = load_contrast(["ways=rl", "optimizers=sgd", "steps=3", "seed=5"])
    (run, *_) = plan.runs
    recipe = plan.recipe(run)
    (arm,) = recipe.arms
    assert (arm.adapter, arm.optimizer, arm.rate, recipe.steps, recipe.seed) == ("full", "sgd", run.rate, 3, 5)
    assert recipe.sampling.max_new_tokens == plan.task.build().max_new_tokens
    assert recipe.model.dtype == "float32"


def test_the_update_is_held_against_the_forks_of_the_same_task():
    plan = load_contrast(["forks=5", "top=3"])
    asked = plan.measurement("tuned")
    assert (asked.base, asked.tuned, asked.count, asked.top, asked.task) == (
        plan.model.name, "tuned", 5, 3, plan.task,
    )  # fmt: skip
