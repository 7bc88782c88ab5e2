"""Laws of packing: the same products, only where it pays, and the model as it was, on errors too."""

import pytest
import torch
from torch import nn

import tiny
from forklora import packing
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


def test_sampling_packs_and_draws_what_it_draws_without(model, monkeypatch):
    traces, seen = [], []
    real = packing._product
    monkeypatch.setattr(packing, "_product", lambda layer: seen.append(layer) or real(layer))
    for available in (True, False):
        if not available:
            monkeypatch.setattr(packing, "_available", lambda: False)
        torch.manual_seed(0)
        traces.append(sample(model, tiny.prompts((3, 2)), sampler=Sampler(max_new_tokens=WORTH), group=3))
    assert seen and not own(model)
    assert (traces[0].completion_ids == traces[1].completion_ids).float().mean() > 0.9  # rounding may turn a draw
    assert torch.allclose(traces[0].candidate_probs[:, 0], traces[1].candidate_probs[:, 0], atol=0.03)


def test_the_operators_of_torch_are_there():
    """Contract: private to torch.compile; where they change, packing must be looked at again."""
    assert torch.ops.mkldnn._reorder_linear_weight.default._schema.arguments[1].name == "batch_size"
    names = [a.name for a in torch.ops.mkldnn._linear_pointwise.default._schema.arguments]
    assert names == ["X", "W", "B", "attr", "scalars", "algorithm"]
