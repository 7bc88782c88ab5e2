"""Trains on rollouts of the base model, drawn once: the cost baseline without a loop of reinforcement learning.

Decisions: the data holds a few prompts, in the same order in every epoch; a batch is rolled out in the first epoch,
with the adapter switched off, and is the same ever after. After "ReasonMaxxer" (arXiv 2605.06241), whose loss looks at
positions of high entropy: TRL's own ``top_entropy_quantile`` does that.
"""

from typing import Any

from forklora.trainers.rl import ForkGRPOTrainer
from torch import nn

from forklora.trace import Trace


class OfflineTrainer(ForkGRPOTrainer):
    """``ForkGRPOTrainer`` that learns from the base model's rollouts for the prompts of its data, epoch after epoch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        self._batches: dict[tuple[tuple[int, ...], ...], Trace] = {}
        super().__init__(*args, **kwargs)

    def draw(self, model: nn.Module, prompts: list[list[int]]) -> Trace:
        """Complete each prompt as the base model does, the first time; later the same rollouts again."""
        key = tuple(tuple(ids) for ids in prompts)
        if key not in self._batches:
            adapted: Any = self.accelerator.unwrap_model(self.model)
            with adapted.disable_adapter():
                self._batches[key] = super().draw(model, prompts)
        return self._batches[key]
