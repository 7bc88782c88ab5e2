"""Precision of an adapter: float32 unless PEFT is told otherwise, and a quantized base is left as it is."""

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file
from torch import nn

from forklora.adapter import KINDS, ForkLoraConfig, add_fork_lora, target_layers
from forklora.export import save_plain_lora
from tiny_policy import (
    FORMS,
    adapted,
    deltas,
    llama,
    logits,
    random_bases,
    settings,
    shake,
    train,
    trainable,
)


def ours(model):
    return {n: p for n, p in model.named_parameters() if "lora_" in n}


def narrow(kind, trained, *, how):
    bases = random_bases(llama())
    config = ForkLoraConfig(**settings(kind, bases=bases, train_basis=trained))
    if how == "get_peft_model":
        return get_peft_model(llama(dtype=torch.bfloat16), config, autocast_adapter_dtype=False)
    model = add_fork_lora(llama(dtype=torch.bfloat16), ForkLoraConfig(), bases, adapter_name="first")
    model.add_adapter("default", config, autocast_adapter_dtype=False)
    assert {p.dtype for n, p in ours(model).items() if ".first." in n} == {torch.float32}
    model.set_adapter("default")
    model.delete_adapter("first")
    return model


@pytest.mark.parametrize("how", ["get_peft_model", "add_adapter"])
@pytest.mark.parametrize("kind, trained", FORMS)
def test_an_adapter_that_is_not_to_be_cast_up_has_the_base_s_precision(kind, trained, how, tmp_path):
    model = narrow(kind, trained, how=how)
    exact, _ = adapted(kind, model=llama(dtype=torch.bfloat16), train_basis=trained)
    assert {p.dtype for p in ours(model).values()} == {torch.bfloat16}
    assert {p.dtype for p in ours(exact).values()} == {torch.float32}
    assert trainable(model) == trainable(exact)
    # cast once, from float32
    for name, parameter in ours(exact).items():
        assert torch.equal(ours(model)[name], parameter.bfloat16())
    shake(model), shake(exact)
    before, found, expected = logits(llama(dtype=torch.bfloat16)), logits(model), logits(exact)
    assert (found - expected).float().norm() < 0.1 * (expected - before).float().norm()
    train(model, steps=1)
    folder = save_plain_lora(model, tmp_path / "adapter")
    assert {t.dtype for t in load_file(folder / "adapter_model.safetensors").values()} == {torch.bfloat16}
    again = narrow(kind, trained, how="get_peft_model")
    again.load_adapter(folder, "default", is_trainable=True, autocast_adapter_dtype=False)
    found, expected = logits(again), logits(model)
    assert (found - expected).float().norm() < 0.1 * (expected - before).float().norm()


class Packed(nn.Linear):
    """A linear layer whose weight is stored as 8-bit numbers, one scale a row, as quantized libraries store it."""

    def __init__(self, layer):
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((layer.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.scale = scale

    def forward(self, x):
        return nn.functional.linear(x, self.weight.float() * self.scale)


class QuantLinear(nn.Module):
    """A quantized layer that is no `nn.Linear`: nothing here knows how it stores its numbers."""

    def __init__(self, layer):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_buffer("qweight", layer.weight.detach().to(torch.int8))


def with_layers(kind, ending="proj"):
    model = llama(tied=False).requires_grad_(False)
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name.endswith(ending):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, kind(module))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_base_is_adapted_without_being_unpacked(kind):
    base = with_layers(Packed)
    stored = {n: m.weight.clone() for n, m in base.named_modules() if isinstance(m, Packed)}
    before = logits(base)
    model, _ = adapted(kind, model=base, bases=random_bases(llama()))
    assert {p.dtype for p in ours(model).values()} == {torch.float32}
    assert torch.equal(logits(model), before)
    train(model, steps=2)
    assert not torch.equal(logits(model), before)
    # the update is that of the low-rank term alone
    layer, x = "model.layers.0.mlp.up_proj", torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    module = model.get_submodule(f"base_model.model.{layer}")
    torch.testing.assert_close(module(x) - module.base_layer(x), x @ deltas(model)[layer].T, rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="cannot merge into a weight stored as torch.int8.*save_plain_lora"):
        model.merge_adapter()
    bare = model.unload()
    found = {n: m.weight for n, m in bare.named_modules() if isinstance(m, Packed)}
    assert found.keys() == stored.keys() and all(torch.equal(found[n], stored[n]) for n in stored)


def test_a_quantized_layer_that_is_unknown_is_refused_by_name_before_anything_is_built():
    model, config = with_layers(QuantLinear, "v_proj"), ForkLoraConfig(target_modules=["q_proj", "v_proj"])
    words = "layers.0.self_attn.v_proj is a QuantLinear: fork adapters are for linear layers"
    for make in (target_layers, lambda m, c: add_fork_lora(m, c, random_bases(llama()))):
        with pytest.raises(ValueError, match=words):
            make(model, config)
    assert not any("lora_" in n for n, _ in model.named_modules())
