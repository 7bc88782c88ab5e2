"""Turns an arm of a recipe into what PEFT is given, or into the weights that are trained without it."""

from typing import Any

import torch
from forklora.recipes.config import Recipe
from forklora.recipes.options import FORK_KINDS, Arm
from forklora.recipes.sources import Sourced
from peft import EvaConfig, LoraConfig, LoraGAConfig, PeftConfig, TinyLoraConfig
from torch import nn

from forklora.adapter import ForkLoraConfig
from forklora.targets import target_layers

_MOVES_BASE = ("pissa", "olora", "lora_ga")


def keeps_base(arm: Arm) -> bool:
    """Whether training leaves the model's own weights as they came.

    These ways of starting take from the weights what the factors begin with; full training is full training.
    """
    return arm.adapter != "full" and arm.init not in _MOVES_BASE


def weights_dtype(recipe: Recipe, arm: Arm) -> str:
    """Precision in which the model is loaded: where its own weights are trained, small steps must not be lost."""
    return "float32" if arm.adapter == "full" else recipe.model.dtype


def adapted_layers(model: nn.Module, arm: Arm) -> list[str]:
    """Names of the layers that an arm targets. Raises ValueError where a target matches nothing."""
    return target_layers(model, LoraConfig(target_modules=_targets(arm)))


def lay_out(model: nn.Module) -> None:
    """Parameters row by row in memory, as DeepSpeed sends them round; some of PEFT's starts leave them transposed.

    A single column counts as contiguous whatever its strides are, and DeepSpeed asks for the strides.
    """
    for parameter in model.parameters():
        if parameter.dim() > 0 and parameter.stride(-1) != 1:
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)


def unfreeze(model: nn.Module, arm: Arm) -> None:
    """Train the weights of the target layers, and nothing else of the model."""
    model.requires_grad_(False)
    modules = dict(model.named_modules())
    for name in adapted_layers(model, arm):
        modules[name].weight.requires_grad_(True)


def adapter_config(arm: Arm, *, sourced: Sourced | None = None, seed: int = 0) -> PeftConfig | None:
    """What PEFT is given for an arm; None where no adapter is trained.

    Args:
        arm: adapter, rank, targets.
        sourced: bases of a fork adapter; None leaves them to the trainer.
        seed: of what TinyLoRA draws.
    """
    alpha = arm.rank if arm.alpha is None else arm.alpha
    if arm.adapter == "full":
        return None
    if arm.adapter == "tinylora":
        numbers = {} if arm.width is None else {"u": arm.width}
        return TinyLoraConfig(
            r=arm.rank, weight_tying=arm.tying, projection_seed=seed, target_modules=_targets(arm), **numbers
        )
    if arm.adapter in FORK_KINDS:
        bases: Any = None if sourced is None else sourced.bases
        return ForkLoraConfig(
            kind=arm.adapter,
            r=arm.rank,
            width=arm.width,
            lora_alpha=alpha,
            target_modules=_targets(arm) if arm.layers is None else list(bases),
            train_basis=arm.train_basis,
            bases=bases,
        )
    start: Any = True if arm.init == "default" else arm.init
    theirs: dict[str, Any] = {
        "eva": {"eva_config": EvaConfig()},
        "lora_ga": {"lora_ga_config": LoraGAConfig()},
    }
    return LoraConfig(
        r=arm.rank,
        lora_alpha=alpha,
        target_modules=_targets(arm),
        init_lora_weights=start,
        **theirs.get(arm.init, {}),
    )


def _targets(arm: Arm) -> str | list[str]:
    return arm.targets if isinstance(arm.targets, str) else list(arm.targets)
