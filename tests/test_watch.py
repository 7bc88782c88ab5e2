"""The curve of an arm: what follows from it, and when a target counts as reached."""

import pytest
from forklora.recipes.watch import Watch

from tiny_policy import recipe_of


class Asked:
    """Stands for whoever asks questions: nothing is asked here."""

    seconds = 4.5


def watch(folder, accuracies, target):
    recipe = recipe_of(folder, target=target)
    found = Watch(recipe, examiner=Asked(), trainer=None, init_seconds=2.0, rollouts=lambda step: 16 + 8 * step)
    found.curve = [
        {"step": step, "rollouts": 16 + 8 * step, "seconds": 2.0 + step, "train_reward": None, "eval_reward": accuracy}
        for step, accuracy in enumerate(accuracies)
    ]
    return found.figures()


@pytest.mark.parametrize(
    ("accuracies", "target", "step"),
    [
        ([0.1, 0.5, 0.6, 0.2, 0.7], 0.6, 2),
        ([0.6, 0.1], 0.6, 0),
        ([0.1, None, None, 0.9], 0.6, 3),
        ([0.1, 0.59], 0.6, None),
        ([0.1, 0.9], None, None),
    ],
)
def test_a_target_is_reached_at_the_first_evaluation_that_is_no_lower(tmp_path, accuracies, target, step):
    found = watch(tmp_path, accuracies, target)
    assert found["steps_to_target"] == step
    assert found["rollouts_to_target"] == (None if step is None else 16 + 8 * step)
    assert found["seconds_to_target"] == (None if step is None else 2.0 + step)
    assert found["eval_reward_start"] == accuracies[0]
    assert found["eval_reward_final"] == accuracies[-1]
    assert (found["init_seconds"], found["evaluation_seconds"], found["target"]) == (2.0, 4.5, target)
