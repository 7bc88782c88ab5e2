"""Labels of arms: every option that makes an arm another one shows."""

import pytest
from forklora.recipes.comparison_labels import adapter_label, optimizer_label
from forklora.recipes.grid import grid_paths, load_grid
from forklora.recipes.options import ArmSpec


@pytest.mark.parametrize(
    ("options", "label"),
    [
        ({"adapter": "lora"}, "LoRA, rank 1"),
        ({"adapter": "lora", "rank": 8, "init": "pissa"}, "PiSSA, rank 8"),
        ({"adapter": "inputs"}, "`inputs`, rank 1"),
        ({"adapter": "block", "rank": 4, "width": 16}, "`block` 16 x 4"),
        ({"adapter": "block", "basis": "random"}, "`block` 1 x 1 on random directions"),
        ({"adapter": "block", "layers": 13}, "`block` 1 x 1, 13 layers"),
        ({"adapter": "span", "forks": {"signal": "confident"}}, "`span`, rank 1 on confident positions"),
        ({"adapter": "tinylora", "width": 13, "tying": 1.0}, "TinyLoRA, 13 per layer, tying 1"),
        ({"adapter": "full"}, "all weights"),
        ({"adapter": "span", "brake": 1.0}, "`span`, rank 1, brake 1"),
        ({"adapter": "inputs", "centering": "value"}, "`inputs`, rank 1, centering value"),
        ({"adapter": "lora", "reward": "random"}, "LoRA, rank 1, random reward"),
    ],
)
def test_an_adapter_has_its_name(options, label):
    arm = ArmSpec.model_validate({"name": "one"} | options).model_dump(mode="json")
    assert adapter_label(arm) == label


def test_an_optimizer_is_named_with_its_rate():
    assert optimizer_label({"optimizer": "adamw"}, 0.003) == "AdamW 0.003"
    assert optimizer_label({"optimizer": "length"}, 0.1) == "SGD, step length 0.1"
    assert optimizer_label({"optimizer": "kl"}, 0.3) == "SGD, step of root 2 KL 0.3"
    assert optimizer_label({"optimizer": "sgd"}, None) == "SGD"


@pytest.mark.parametrize("name", sorted(grid_paths()))
def test_no_two_arms_of_a_shipped_comparison_look_alike(name):
    arms = [arm.model_dump(mode="json") for arm in load_grid(name).arms]
    assert len({(adapter_label(arm), optimizer_label(arm, None)) for arm in arms}) == len(arms)
