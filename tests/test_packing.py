"""Laws of packing: the same products, only where it pays, and the model as it was, on errors too."""

import pytest
import torch
from peft import LoraConfig
from torch import nn

import tiny
from forklora import packing
from forklora.adapter import KINDS, ForkLinear, ForkLoraConfig, ForkVariant, add_fork_lora
from forklora.packing import WORTH, packed
from forklora.rollouts import Sampler, sample


def layers(model):
    return [m for m in model.modules() if type(m) is nn.Linear]


def own(model):
    return [m for m in layers(model) if "forward" in m.__dict__]


@pytest.fixture
def model():
    return tiny.model("qwen2", dtype=torch.bfloat16).requires_grad_(False)


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_multiplies_as_before(rows, bias):
    layer = nn.Linear(48, 80, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(2, rows, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = x.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0)
    with torch.no_grad(), packed(layer, tokens=WORTH):
        assert "forward" in layer.__dict__
        found = layer(x)
    assert found.dtype == torch.bfloat16 and found.shape == (2, rows, 80)
    assert (found.double() - exact).abs().max() <= 2**-7 * exact.abs().max()
    assert "forward" not in layer.__dict__


def test_only_frozen_narrow_layers_are_packed_and_only_for_many_tokens_without_gradients(model):
    model.lm_head.weight.requires_grad_(True)
    model.model.layers[0].mlp.up_proj.float()
    with torch.no_grad(), packed(model, tokens=WORTH):
        assert len(own(model)) == len(layers(model)) - 2
    with torch.no_grad(), packed(model, tokens=WORTH - 1):
        assert not own(model)
    with packed(model, tokens=WORTH):
        assert not own(model)
    with torch.no_grad(), packed(model, tokens=WORTH, leave=model.lm_head):
        assert "forward" not in model.lm_head.__dict__


def test_without_the_kernels_nothing_is_packed(model, monkeypatch):
    monkeypatch.setattr(packing, "_available", lambda: False)
    with torch.no_grad(), packed(model, tokens=WORTH):
        assert not own(model)


def test_the_model_is_as_it_was_after_an_error(model):
    with pytest.raises(ZeroDivisionError), torch.no_grad(), packed(model, tokens=WORTH):
        assert own(model)
        raise ZeroDivisionError
    assert not own(model)


def test_what_zero_3_has_partitioned_is_left_alone(model):
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.new_empty(0)
    with torch.no_grad(), packed(model, tokens=WORTH):
        assert len(own(model)) == len(layers(model)) - 1


class Pair(nn.Module):
    """Three layers, the first two of which read the same input; the second has a bias."""

    def __init__(self):
        super().__init__()
        self.one, self.three = (nn.Linear(n, 24, bias=False, dtype=torch.bfloat16) for n in (32, 24))
        self.two = nn.Linear(32, 8, dtype=torch.bfloat16)
        self.requires_grad_(False)

    def forward(self, x, *, apart=False):
        first = self.one(x)
        return torch.cat([first, self.two(x.clone() if apart else x), self.three(first)], -1)


@pytest.mark.parametrize("apart", [False, True])
def test_layers_with_the_same_input_are_one_product_and_others_are_not_mixed_up(apart, monkeypatch):
    pair, packs, generator = Pair(), [], torch.Generator().manual_seed(0)
    real = packing._Together._pack
    monkeypatch.setattr(packing._Together, "_pack", lambda self: packs.append(len(self.maps)) or real(self))
    inputs = [torch.randn(3, 1, 32, generator=generator).bfloat16() for _ in range(4)]
    with torch.no_grad():
        expected = [pair(x) for x in inputs]
        with packed(pair, tokens=WORTH):
            pair(inputs[0])
            found = [pair(x, apart=apart) for x in inputs]
    assert packs == [2, 1]
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and (one - other).abs().max() <= 2**-6 * other.abs().max()


def test_a_layer_called_again_before_its_neighbor_keeps_its_own_packing():
    pair, x = Pair(), torch.ones(2, 32, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = pair.one(x), pair.two(x)
        with packed(pair, tokens=WORTH):
            pair.one(x), pair.one(x), pair.two(x), pair.two(x)
            found = pair.one(x), pair.two(x)
    assert all(
        (one - other).abs().max() <= 2**-6 * other.abs().max() for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [1, 2])
def test_adapters_are_packed_with_their_layers(model, kind, rank, monkeypatch):
    adapted = adapted_at_random(model, kind=kind, rank=rank)
    ids = torch.arange(12).view(4, 3)
    with torch.no_grad():
        expected = adapted(input_ids=ids).logits
        with packed(adapted, tokens=WORTH, leave=model.lm_head):
            assert sum("forward" in m.__dict__ for m in adapted.modules()) == 14  # and nothing within them
            first = adapted(input_ids=ids).logits
            monkeypatch.setattr(ForkVariant, "forward", None)  # from now on nothing goes through PEFT
            found = adapted(input_ids=ids).logits
        adapted.base_model.disable_adapter_layers()
        without = adapted(input_ids=ids).logits
    assert torch.equal(first, expected)
    assert (found - expected).norm() <= 0.02 * (without - expected).norm()


def adapted_at_random(model, *, kind, rank):
    generator = torch.Generator().manual_seed(0)
    shapes = {n: m.weight.shape for n, m in model.named_modules() if type(m) is nn.Linear and n != "lm_head"}
    bases = {
        n: tuple(torch.linalg.qr(torch.randn(s, 4, generator=generator)).Q for s in shape)
        for n, shape in shapes.items()
    }
    width = 4 if kind in ("core", "block") else None
    config = ForkLoraConfig(kind=kind, r=rank, width=width, bases=bases, lora_alpha=1.5 * rank)
    adapted = add_fork_lora(model, config)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.5)
    return adapted


def test_a_layer_in_any_other_state_is_not_a_plain_map(model):
    adapted = adapted_at_random(model, kind="span", rank=1)
    layer = next(m for m in adapted.modules() if isinstance(m, ForkLinear))
    assert layer.linear_map().a is layer.lora_A["default"].weight
    with adapted.disable_adapter():
        assert layer.linear_map().a is None
    layer.lora_dropout["default"] = nn.Dropout(0.5)
    assert layer.eval().linear_map() is not None and layer.train().linear_map() is None
    layer.eval().merge()
    assert layer.linear_map() is None
    layer.unmerge()
    adapted.add_adapter("second", LoraConfig(r=1, target_modules="all-linear"))
    adapted.base_model.set_adapter(["default", "second"])
    assert layer.linear_map() is None
    adapted.base_model.set_adapter("second")
    assert layer.linear_map() is None


def test_sampling_packs_and_draws_what_it_draws_without(model, monkeypatch):
    traces, packs = [], []
    real = packing._Together._pack
    monkeypatch.setattr(packing._Together, "_pack", lambda self: packs.append(len(self.maps)) or real(self))
    for available in (True, False):
        if not available:
            monkeypatch.setattr(packing, "_available", lambda: False)
        torch.manual_seed(0)
        traces.append(sample(model, tiny.prompts((3, 2)), sampler=Sampler(max_new_tokens=WORTH), group=3))
    assert packs == [3, 1, 2, 1] * 2 and not own(model)
    assert (traces[0].completion_ids == traces[1].completion_ids).float().mean() > 0.9  # rounding may turn a draw
    assert torch.allclose(traces[0].candidate_probs[:, 0], traces[1].candidate_probs[:, 0], atol=0.03)


def test_the_operators_of_torch_are_there():
    """Contract: private to torch.compile; where they change, packing must be looked at again."""
    assert torch.ops.mkldnn._reorder_linear_weight.default._schema.arguments[1].name == "batch_size"
    names = [a.name for a in torch.ops.mkldnn._linear_pointwise.default._schema.arguments]
    assert names == ["X", "W", "B", "attr", "scalars", "algorithm"]
