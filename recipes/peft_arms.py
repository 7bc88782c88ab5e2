"""Turns an arm of a recipe into what PEFT is given."""

from forklora.recipes.options import Arm
from peft import LoraConfig

from forklora.adapter import ForkLoraConfig


def adapter_config(arm: Arm) -> LoraConfig:
    """What PEFT is given for this arm."""
    targets = arm.targets if isinstance(arm.targets, str) else list(arm.targets)
    alpha = arm.rank if arm.alpha is None else arm.alpha
    if arm.adapter == "lora":
        return LoraConfig(r=arm.rank, lora_alpha=alpha, target_modules=targets)
    return ForkLoraConfig(
        kind=arm.adapter,
        r=arm.rank,
        width=arm.width,
        lora_alpha=alpha,
        target_modules=targets,
        train_basis=arm.train_basis,
    )
