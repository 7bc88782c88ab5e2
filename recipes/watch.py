"""Keeps the curve of an arm while it trains: held-out accuracy, rewards, rollouts, seconds.

Decisions: seconds count initialization and training, not evaluation; rollouts count those the bases were read from.
"""

import time
from collections.abc import Callable
from typing import Any

from forklora.recipes.config import Recipe
from forklora.recipes.evaluate import Examiner
from forklora.recipes.ranks import this_rank
from forklora.trainers.rl import ForkGRPOTrainer
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl.models import unwrap_model_for_generation


class Watch(TrainerCallback):
    """Measures held-out accuracy on its way, keeps the curve and shows one bar.

    Args:
        recipe: the recipe of the one arm.
        examiner: asks the held-out questions.
        trainer: whose policy is asked.
        init_seconds: what the adapter took before the first step.
        rollouts: rollouts drawn until after a step, those for the bases among them.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        examiner: Examiner,
        trainer: ForkGRPOTrainer,
        init_seconds: float,
        rollouts: Callable[[int], int],
    ) -> None:
        self.recipe, self.examiner, self.trainer = recipe, examiner, trainer
        self.init_seconds, self.rollouts = init_seconds, rollouts
        self.training_seconds, self.since = 0.0, 0.0
        self.curve: list[dict[str, Any]] = []
        self.bar = tqdm(total=recipe.steps, desc=recipe.arms[0].name, unit="step", disable=this_rank() > 0)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Accuracy before the first step."""
        self._point(0, None, due=True)
        self.since = time.perf_counter()

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """After every step: the reward of its rollouts, and accuracy where it is due."""
        if "reward" not in logs:
            return
        self.training_seconds += time.perf_counter() - self.since
        step, every = state.global_step, self.recipe.evaluation.every
        self._point(step, logs["reward"], due=step % every == 0 or step == self.recipe.steps)
        self.bar.update(1)
        self.since = time.perf_counter()

    def _point(self, step: int, reward: float | None, *, due: bool) -> None:
        accuracy = self._accuracy() if due else None
        self.curve.append(
            {
                "step": step,
                "rollouts": self.rollouts(step),
                "seconds": round(self.init_seconds + self.training_seconds, 3),
                "train_reward": reward,
                "eval_reward": accuracy,
            }
        )
        shown = {k: v for k, v in (("reward", reward), ("held-out", accuracy)) if v is not None}
        self.bar.set_postfix({k: f"{v:.3f}" for k, v in shown.items()})

    def _accuracy(self) -> float:
        """Of the policy without wrappers; every rank takes part, and under ZeRO-3 each holds all weights meanwhile."""
        with unwrap_model_for_generation(self.trainer.model_wrapped, self.trainer.accelerator) as policy:
            return self.examiner.accuracy(policy)

    def figures(self) -> dict[str, Any]:
        """The record's curve and what follows from it."""
        self.bar.close()
        seen = [p for p in self.curve if p["eval_reward"] is not None]
        target = self.recipe.target
        hit = next((p for p in seen if target is not None and p["eval_reward"] >= target), None)
        return {
            "curve": self.curve,
            "init_seconds": self.init_seconds,
            "evaluation_seconds": self.examiner.seconds,
            "target": target,
            "steps_to_target": hit and hit["step"],
            "rollouts_to_target": hit and hit["rollouts"],
            "seconds_to_target": hit and hit["seconds"],
            "eval_reward_start": seen[0]["eval_reward"],
            "eval_reward_final": seen[-1]["eval_reward"],
        }
