"""Finds what is wrong with a recipe for its model and this machine before anything long: no weights are read."""

import importlib.util

import torch
from forklora.recipes.config import Recipe
from forklora.recipes.demo import DEMO_NAME, demo_model_folder
from forklora.recipes.options import Arm
from forklora.recipes.peft_arms import adapted_layers, adapter_config
from forklora.recipes.refusal import Refusal
from torch import nn

from forklora.adapter import ForkLoraConfig
from forklora.backward import layer_shape
from forklora.unembed import output_head


def check_recipe(recipe: Recipe) -> None:
    """Raise a Refusal, with every complaint, where an arm's adapter does not fit the model, or ranks the machine.

    The model is built from its configuration on the meta device, so the check takes a second whatever its size.
    """
    if recipe.deepspeed is not None and importlib.util.find_spec("deepspeed") is None:
        raise Refusal(f'deepspeed={recipe.deepspeed} needs a package: pip install "forklora[deepspeed]"')
    if torch.cuda.is_available() and torch.cuda.device_count() < recipe.ranks:
        raise Refusal(f"ranks={recipe.ranks}, but there are {torch.cuda.device_count()} accelerators to train on")
    model = _empty_model(recipe.model.name)
    complaints = [text for arm in recipe.arms if (text := _complaint(model, arm))]
    if complaints:
        raise Refusal("the arms do not fit the model:\n" + "\n".join(f"  {text}" for text in complaints))


def _empty_model(name: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    source = str(demo_model_folder()) if name == DEMO_NAME else name
    try:
        config = AutoConfig.from_pretrained(source)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        output_head(model)
    except (OSError, ValueError) as error:
        raise Refusal(f"cannot use the model {name!r}: {str(error).splitlines()[0]}") from error
    return model


def _complaint(model: nn.Module, arm: Arm) -> str:
    """What is wrong with an arm for this model; nothing where all fits."""
    if arm.init == "orthogonal" and arm.rank % 2:
        return f"{arm.name}: init=orthogonal takes an even rank, and rank is {arm.rank}"
    try:
        config = adapter_config(arm.model_copy(update={"layers": None}))
        modules = dict(model.named_modules())
        shapes = {name: layer_shape(modules[name]) for name in adapted_layers(model, arm)}
    except ValueError as error:
        return f"{arm.name}: {error}"
    if arm.layers is not None and arm.layers > len(shapes):
        return f"{arm.name}: layers={arm.layers}, and only {len(shapes)} layers get an adapter"
    if not isinstance(config, ForkLoraConfig):
        return ""
    needs = (config.output_width, config.input_width)
    for name, shape in shapes.items():
        for side, need, size in zip(("output", "input"), needs, shape, strict=True):
            if need > size:
                return f"{arm.name}: {need} {side} directions asked for, {name} has {size} {side}s; lower rank or width"
    return ""
