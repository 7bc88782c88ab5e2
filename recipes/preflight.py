"""Finds what is wrong with a recipe for its model and this machine before anything long: no weights are read."""

import importlib.util

import torch
from forklora.recipes.config import Recipe
from forklora.recipes.data_starts import NEEDS_DATA
from forklora.recipes.demo import DEMO_NAME, demo_model_folder
from forklora.recipes.options import Arm
from forklora.recipes.peft_arms import adapted_layers, adapter_config, keeps_base
from forklora.recipes.refusal import Refusal
from torch import nn

from forklora.adapter import ForkLoraConfig
from forklora.backward import layer_shape
from forklora.unembed import output_head

# Output and input directions, in ranks, that PEFT takes from a layer's weight, inputs or gradient; where a layer has
# fewer it fails, or makes smaller factors without a word.
_LORA_NEEDS = {"pissa": (1, 1), "olora": (1, 1), "mica": (1, 1), "eva": (0, 2), "lora_ga": (2, 2)}


def check_recipe(recipe: Recipe) -> None:
    """Raise a Refusal, with every complaint, where an arm's adapter does not fit the model, or ranks the machine.

    The model is built from its configuration on the meta device, so the check takes a second whatever its size.
    """
    if recipe.deepspeed is not None and importlib.util.find_spec("deepspeed") is None:
        raise Refusal(f'deepspeed={recipe.deepspeed} needs a package: pip install "forklora[deepspeed]"')
    if torch.cuda.is_available() and torch.cuda.device_count() < recipe.ranks:
        raise Refusal(f"ranks={recipe.ranks}, but there are {torch.cuda.device_count()} accelerators to train on")
    model = _empty_model(recipe.model.name)
    found = (_complaint(model, recipe, arm) for arm in recipe.arms)
    complaints = [text for text in dict.fromkeys(found) if text]
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


def _complaint(model: nn.Module, recipe: Recipe, arm: Arm) -> str:
    """What is wrong with an arm for this model; nothing where all fits."""
    found = _odd(recipe, arm)
    if found:
        return f"{arm.name}: {found}"
    try:
        config = adapter_config(arm.model_copy(update={"layers": None}))
        modules = dict(model.named_modules())
        shapes = {name: layer_shape(modules[name]) for name in adapted_layers(model, arm)}
    except ValueError as error:
        return f"{arm.name}: {error}"
    if arm.layers is not None and arm.layers > len(shapes):
        return f"{arm.name}: layers={arm.layers}, and only {len(shapes)} layers get an adapter"
    needs = _LORA_NEEDS.get(arm.init, (0, 0)) if arm.adapter == "lora" else (0, 0)
    needs = (needs[0] * arm.rank, needs[1] * arm.rank)
    if isinstance(config, ForkLoraConfig):
        needs = (config.output_width, config.input_width)
    elif arm.adapter == "tinylora":
        needs = (arm.rank, arm.rank)
    for name, shape in shapes.items():
        for side, need, size in zip(("output", "input"), needs, shape, strict=True):
            if need > size:
                return f"{arm.name}: {need} {side} directions asked for, {name} has {size} {side}s; lower rank or width"
    return ""


def _odd(recipe: Recipe, arm: Arm) -> str:
    """What is wrong with an arm whatever the model."""
    if arm.init == "orthogonal" and arm.rank % 2:
        return f"init=orthogonal takes an even rank, and rank is {arm.rank}"
    if arm.init in NEEDS_DATA and recipe.forks.prompts < recipe.ranks:
        return f"init={arm.init} shares forks.prompts={recipe.forks.prompts} among ranks={recipe.ranks}; ask for more"
    if arm.base_prompts is None:
        return ""
    if not keeps_base(arm):
        which = "adapter=full" if arm.adapter == "full" else f"init={arm.init}"
        return f"base_prompts needs the base model beside the adapter, and {which} changes it"
    if arm.base_prompts % recipe.prompts:
        return f"base_prompts={arm.base_prompts} are no whole number of steps of prompts={recipe.prompts}"
    return ""
