"""A callback for any Trainer that renews the bases of a fork adapter from the policy's rollouts of the moment.

Decisions: what was learned is kept beside the adapter's own numbers, so the policy is the same right before and right
after, and what is saved is an ordinary LoRA of a rank that grows with every renewal; optimizer states belong to the
old bases and are dropped.

    trainer.add_callback(RefreshCallback(tokenizer, prompts, sampler=Sampler(max_new_tokens=64), every=50))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from forklora.trainers.engine import managed, put_parameter
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from forklora.attachment import needed
from forklora.bases import BasisConfig, collect_bases
from forklora.collective import rank, ranks
from forklora.rollouts import Sampler
from forklora.slots import renew_bases, renewable

_DEFAULT = BasisConfig(progress=False)


class RefreshCallback(TrainerCallback):
    """Every few steps, but not after the last one, collects bases anew and renews those of the adapter.

    ``renewed`` lists the steps at which it did so. A run is resumed by ForkGRPOTrainer, whose checkpoints say how often
    bases were renewed; elsewhere call ``forklora.slots.make_room(model, times)`` before the checkpoint is loaded.

    Args:
        tokenizer: encodes prompts that are no token ids.
        prompts: what is completed for the bases, the same on every rank; the rollouts come on top of the training's.
        sampler: the policy's own sampling settings.
        every: steps between two renewals.
        collect: seed, group and batch; the step is added to the seed.
        adapter_name: PEFT's name of the adapter.
    """

    def __init__(
        self,
        tokenizer: Any,  # noqa: ANN401
        prompts: Sequence[Any],
        *,
        sampler: Sampler,
        every: int = 50,
        collect: BasisConfig = _DEFAULT,
        adapter_name: str = "default",
    ) -> None:
        if every < 1 or not prompts:
            raise ValueError(f"every={every} must be 1 or more, and there must be prompts; got {len(prompts)}.")
        self.tokenizer, self.prompts, self.sampler = tokenizer, list(prompts), sampler
        self.every, self.collect, self.adapter_name = every, collect, adapter_name
        self.renewed: list[int] = []

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module | None = None,
        optimizer: Any = None,  # noqa: ANN401
        **kwargs: Any,
    ) -> None:
        """Refuses what cannot be renewed, before the first step.

        Raises:
            ValueError: no fork adapter, one whose basis is trained or that ZeRO-3 holds in pieces, an optimizer state
                inside DeepSpeed that could not be dropped, or ``load_best_model_at_end``.
        """
        assert model is not None
        renewable(model, adapter_name=self.adapter_name)
        if args.load_best_model_at_end:
            raise ValueError(
                "load_best_model_at_end=True: a checkpoint of before a renewal has another rank, and does not fit the "
                "adapter of after it. Leave it False and load the best checkpoint as a plain LoRA."
            )
        inner = _inmost(optimizer)
        stateless = type(inner) is torch.optim.SGD and not any(group["momentum"] for group in inner.param_groups)
        if any(managed(p) for p in model.parameters()) and not stateless:
            raise ValueError(
                f"{type(inner).__name__} in DeepSpeed keeps states of the old bases, in pieces: renew bases with plain "
                "SGD without momentum there (which a step_length or step_kl brings with it), or without DeepSpeed."
            )
        self.renewed = [step for step in self.renewed if step <= state.global_step]

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module | None = None,
        optimizer: Any = None,  # noqa: ANN401
        **kwargs: Any,
    ) -> None:
        """Renews the bases where it is due.

        Raises:
            ValueError: no forks, or too few directions; the adapter is as it was.
        """
        if state.global_step % self.every or state.global_step >= state.max_steps:
            return
        assert model is not None
        config, inner = renewable(model, adapter_name=self.adapter_name), _inmost(optimizer)
        collect = replace(self.collect, seed=self.collect.seed + state.global_step)
        bases = collect_bases(
            model,
            self.tokenizer,
            self.prompts[rank() :: ranks()],
            config=needed(model, config, collect=collect),
            sampler=self.sampler,
        )

        def put(parameter: Tensor, value: Tensor) -> None:
            put_parameter(parameter, value)
            inner.state.pop(parameter, None)

        renew_bases(model, bases, adapter_name=self.adapter_name, put=put)
        self.renewed.append(state.global_step)
        state.log_history.append({"refresh/renewed": float(config.folds), "step": state.global_step})


def _inmost(optimizer: Any) -> Any:  # noqa: ANN401
    """The optimizer below the wrappers of Accelerate and DeepSpeed."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
