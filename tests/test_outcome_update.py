"""Figures of an update are those of the weights after PEFT's own merging, for adapters of every kind."""

import copy

import pytest
import torch
from forklora.recipes.outcome import update_figures
from peft import LoraConfig, TinyLoraConfig, get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from forklora.measure import stable_rank, top_energy, unchanged_share
from tiny_policy import adapted, gpt2, llama, shake

ARMS = {
    "lora": {},
    "scaled": {"r": 3, "lora_alpha": 7},
    "pissa": {"r": 2, "init_lora_weights": "pissa"},
    "olora": {"r": 2, "init_lora_weights": "olora"},
}


def lora(model, **options):
    chosen = {"r": 1, "lora_alpha": 1, "target_modules": "all-linear"} | options
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return get_peft_model(model, LoraConfig(**chosen))


def expected_figures(policy, base):
    """From the weights after PEFT's own merging, by singular values."""
    merged = copy.deepcopy(policy)
    merged = merged.merge_and_unload() if hasattr(merged, "merge_and_unload") else merged
    names = [n for n, m in base.named_modules() if isinstance(m, nn.Linear | Conv1D) and n != "lm_head"]
    pairs = [(base.get_submodule(n).weight.detach(), merged.get_submodule(n).weight.detach()) for n in names]
    deltas = [(after - before).double() for before, after in pairs]
    moved = [d for d in deltas if d.norm() > 1e-4]
    before, after = (torch.cat([w.flatten() for w in side]) for side in zip(*pairs, strict=True))
    return {
        "changed_share": 1 - unchanged_share(before, after),
        "stable_rank": sum(map(stable_rank, moved)) / len(moved) if moved else None,
        "top16_energy": sum(map(top_energy, moved)) / len(moved) if moved else None,
        "norm": float(torch.cat([d.flatten() for d in deltas]).norm()),
    }


def agrees(found, expected):
    assert list(found) == list(expected)
    assert found["changed_share"] == pytest.approx(expected["changed_share"], abs=2e-4)  # ties of rounding
    for name in ("stable_rank", "top16_energy", "norm"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4), name


@pytest.mark.parametrize("arm", ARMS)
def test_figures_of_an_update_are_those_of_the_merged_weights(arm):
    policy = shake(lora(llama(), **ARMS[arm]), size=0.05)
    expected = expected_figures(policy, llama())
    assert 0 < expected["changed_share"] < 1
    agrees(update_figures(policy, llama()), expected)


@pytest.mark.parametrize("kind", ["span", "block"])
def test_so_are_those_of_fork_adapters(kind):
    policy = shake(adapted(kind)[0], size=0.05)
    agrees(update_figures(policy, llama()), expected_figures(policy, llama()))


def test_so_are_those_of_tinylora():
    policy = get_peft_model(llama(), TinyLoraConfig(r=2, u=3, target_modules="all-linear"))
    with torch.no_grad():
        for name, numbers in policy.named_parameters():
            if "tinylora_v" in name:
                numbers.add_(0.3 * torch.randn(numbers.shape, generator=torch.Generator().manual_seed(2)))
    found = update_figures(policy, llama())
    agrees(found, expected_figures(policy, llama()))
    assert 1 <= found["stable_rank"] <= 2


def test_weights_stored_the_other_way_round_count_the_same():
    policy = shake(lora(gpt2(), r=2, fan_in_fan_out=True), size=0.05)
    agrees(update_figures(policy, gpt2()), expected_figures(policy, gpt2()))


@pytest.mark.parametrize("make", [llama, gpt2])
def test_of_a_trained_model_the_trainable_layers_count(make):
    policy = make()
    agrees(update_figures(shake(policy, size=0.02), make()), expected_figures(policy, make()))
    for weight in policy.parameters():
        weight.requires_grad_(requires_grad=False)
    assert set(update_figures(policy, make()).values()) == {None}


def test_layers_that_stayed_have_no_rank():
    policy = lora(llama(), r=2)
    assert update_figures(policy, llama()) == {
        "changed_share": 0.0, "stable_rank": None, "top16_energy": None, "norm": 0.0,
    }  # fmt: skip
    layer = policy.base_model.model.model.layers[0].mlp.up_proj
    nn.init.normal_(layer.lora_B["default"].weight)
    found, delta = update_figures(policy, llama()), layer.get_delta_weight("default").detach()
    assert found["stable_rank"] == pytest.approx(stable_rank(delta))
    assert found["norm"] == pytest.approx(float(delta.norm()))
    assert 0 < found["changed_share"] < 1 / 10  # one of fourteen layers


def test_weights_that_are_not_finite_have_no_figures():
    policy = shake(lora(llama()))
    policy.base_model.model.model.layers[1].mlp.up_proj.lora_B["default"].weight.data[0] = torch.nan
    assert set(update_figures(policy, llama()).values()) == {None}
