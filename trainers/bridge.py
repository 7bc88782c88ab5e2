"""The only file that touches private parts of TRL, Accelerate and DeepSpeed; a contract test pins each.

What is private, and why it is needed:

- ``GRPOTrainer._generate_single_turn``: the one place where tokens are drawn; ours records the distribution meanwhile.
- ``GRPOTrainer._generate_and_score_completions``: its dictionary is shuffled and split row by row; what was recorded
  has to travel in it to stay with its rows.
- ``GRPOTrainer._compute_loss``: the loss itself.
- ``GRPOTrainer._metrics``, ``_step``, ``_tokenizer``: metrics reach the log, and tokens the sampler, only through them.
- ``trl.trainer.utils.create_model_from_path``: a model given by name must be there before the adapter, for its bases.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from trl import GRPOTrainer
from trl.models.utils import unwrap_model_for_generation
from trl.trainer.utils import create_model_from_path

from forklora.trace import Trace


def load_policy(name: str, args: Any) -> nn.Module:  # noqa: ANN401
    """The model TRL would load for this name under these arguments."""
    settings = dict(args.model_init_kwargs or {})
    if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        settings["device_map"] = None
    settings.setdefault("trust_remote_code", args.trust_remote_code)
    return create_model_from_path(name, **settings)


class SeamedGRPOTrainer(GRPOTrainer):
    """TRL's trainer with two seams: :meth:`draw` instead of its generation, :meth:`policy_loss` instead of its loss.

    A subclass that sets neither ``recording`` nor ``own_loss`` gets TRL's behavior unchanged.
    """

    recording = False
    own_loss = False

    def draw(self, model: nn.Module, prompts: list[list[int]]) -> Trace:
        """Complete each prompt once; the rows of the trace are the prompts in their order."""
        raise NotImplementedError

    def policy_loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        """The loss of one micro-batch, already divided for gradient accumulation."""
        raise NotImplementedError

    def finish_rollouts(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Add to, or change, the rows of a whole generation batch before they are shuffled and split."""
        return batch

    def metric(self, name: str, value: float) -> None:
        """Add a number to the averages of the next log line."""
        self._metrics["train" if self.model.training else "eval"][name].append(value)

    @property
    def accumulation(self) -> float:
        """Number of micro-batches a training step adds up; evaluation adds up none."""
        return float(self.current_gradient_accumulation_steps) if self.model.training else 1.0

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        if not self.recording:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        settings = {
            "gather_deepspeed3_params": self.args.ds3_gather_for_generation,
            "gradient_checkpointing_kwargs": self.args.gradient_checkpointing_kwargs,
        }
        with unwrap_model_for_generation(self.model_wrapped, self.accelerator, **settings) as unwrapped:
            self.trace = self.draw(unwrapped, prompt_ids)
        rows = zip(self.trace.completion_ids, self.trace.logprob, self.trace.completion_mask, strict=True)
        drawn = [(ids[mask].tolist(), logprob[mask].tolist()) for ids, logprob, mask in rows]
        return [ids for ids, _ in drawn], [logprob for _, logprob in drawn]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        return self.finish_rollouts(super()._generate_and_score_completions(inputs))

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        if self.own_loss:
            return self.policy_loss(model, inputs)
        return super()._compute_loss(model, inputs)


def accumulated_items(trainer: SeamedGRPOTrainer, batch: dict[str, Any]) -> Tensor:
    """Tokens of one accumulation window on one rank: what TRL divides by under ``dapo``."""
    items = torch.clamp(batch["num_items_in_batch"], min=1.0) / trainer.accelerator.num_processes
    if trainer.model.training:
        items = items * trainer.accumulation / trainer.args.steps_per_generation
    return items
