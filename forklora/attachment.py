"""Turns a model plus prompts, saved bases or any tensors into a ``PeftModel``, in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import nn

from forklora.adapter import ForkLoraConfig, add_fork_lora, target_layers
from forklora.bases import Bases, BasisConfig, collect_bases
from forklora.rollouts import Sampler


def attach(
    model: nn.Module,
    config: ForkLoraConfig,
    *,
    bases: Mapping[str, Any] | str | Path | None = None,
    tokenizer: Any = None,  # noqa: ANN401
    prompts: Sequence[Any] | None = None,
    sampler: Sampler | None = None,
    collect: BasisConfig | None = None,
) -> PeftModel:
    """Give a model a fork adapter.

    Args:
        model: causal language model.
        config: kind, rank, targets.
        bases: saved bases (a path), or any mapping of layer names to tensors. Then nothing is sampled.
        tokenizer: with ``prompts``, for collecting bases from the model's own rollouts.
        prompts: strings, chat messages or token ids.
        sampler: the policy's sampling settings; required with ``prompts``.
        collect: how to collect; as many directions as the kind needs by default.

    Raises:
        ValueError: neither bases nor prompts were given, or both.
    """
    if (bases is None) == (prompts is None):
        raise ValueError("attach needs either bases (a path or a mapping) or prompts with a tokenizer and a sampler.")
    if isinstance(bases, str | Path):
        bases = Bases.load(bases)
    if prompts is not None:
        if sampler is None:
            raise ValueError("prompts were given without a sampler: pass Sampler(max_new_tokens=..., temperature=...).")
        bases = collect_bases(model, tokenizer, prompts, config=needed(model, config, collect=collect), sampler=sampler)
    return add_fork_lora(model, config, bases)


def needed(model: nn.Module, config: ForkLoraConfig, *, collect: BasisConfig | None = None) -> BasisConfig:
    """Collection settings that give this adapter what it needs: its target layers, and enough directions a side."""
    start, ranks = collect or BasisConfig(), (config.rank_pattern or {}).values()
    return dataclasses.replace(
        start,
        layers=tuple(target_layers(model, config)),
        output=max(config.output_width, *ranks, 1),
        input=max(config.input_width, *ranks, 1),
    )
