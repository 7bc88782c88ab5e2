"""What the arms of a recipe may say: options that belong to other adapters are refused by name."""

import pytest
from forklora.recipes.options import Arm
from pydantic import ValidationError


def arm(**options):
    return Arm.model_validate({"name": "one", "adapter": "block", "rate": 0.1} | options)


@pytest.mark.parametrize(
    "options",
    [
        {"adapter": "lora", "init": "pissa"},
        {"adapter": "span", "basis": "minor", "train_basis": True},
        {"basis": "random"},
        {"layers": 13},
        {"layers": 13, "basis": "random"},
        {"brake": 1.0},
        {"forks": {"signal": "confident"}},
        {"adapter": "tinylora", "rank": 2, "width": 13, "tying": 1.0},
        {"adapter": "full", "optimizer": "adamw"},
        {"adapter": "lora", "centering": "none", "top_entropy": 0.2, "base_prompts": 32},
    ],
)
def test_what_goes_together_is_taken(options):
    found = arm(**options)
    assert all(getattr(found, name) == value for name, value in options.items() if name != "forks")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"adapter": "lora", "width": 2}, "width is for the adapters core, block and tinylora"),
        ({"adapter": "lora", "train_basis": True}, "train_basis is for fork adapters"),
        ({"adapter": "tinylora", "basis": "random"}, "basis is for fork adapters"),
        ({"adapter": "lora", "layers": 3}, "layers is for fork adapters"),
        ({"brake": 1.0, "optimizer": "kl"}, "brake is for the optimizer length"),
        ({"basis": "singular", "forks": {"seed": 1}}, "forks is for fork adapters with the basis forks"),
        ({"init": "pissa"}, "init is for the adapter lora"),
        ({"tying": 0.5}, "tying is for the adapter tinylora"),
        ({"adapter": "lora", "top_entropy": 0.5}, "top_entropy is for centering none"),
    ],
)
def test_what_belongs_to_another_adapter_is_refused(options, says):
    with pytest.raises(ValidationError) as caught:
        arm(**options)
    assert says in str(caught.value)
