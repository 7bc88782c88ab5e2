"""What learns in an arm: rewards that know nothing, rollouts counted with those for the bases."""

from types import SimpleNamespace

from forklora.recipes.learner import Learner, coins
from forklora.recipes.options import Arm


def test_coins_know_the_seed_and_nothing_of_the_completions():
    draws = coins(3)(["a"] * 4000)
    assert set(draws) == {0.0, 1.0}
    assert abs(sum(draws) / 4000 - 0.5) < 0.04
    assert coins(3)([str(i) for i in range(4000)]) == draws
    assert coins(4)(["a"] * 4000) != draws


def test_coins_go_on_from_call_to_call():
    reward = coins(0)
    assert [*reward(["a"] * 50), *reward(["b"] * 50)] == coins(0)(["c"] * 100)


def learner(arm, *, bases):
    """A learner whose step has 2 x 8 rollouts on 3 ranks."""
    args = SimpleNamespace(per_device_train_batch_size=16, world_size=3, num_generations=8)
    return Learner(SimpleNamespace(args=args), None, None, arm, 0.0, bases, "", None)


def test_rollouts_hold_those_for_the_bases():
    one = learner(Arm(name="one", adapter="span", rate=0.1), bases=512)
    assert [one.rollouts(step) for step in (0, 1, 10)] == [512, 560, 992]


def test_rollouts_of_the_base_model_are_all_drawn_before_the_first_step():
    one = learner(Arm(name="one", adapter="lora", rate=0.1, base_prompts=32), bases=0)
    assert [one.rollouts(step) for step in (0, 1, 10)] == [256, 256, 256]
