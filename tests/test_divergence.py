"""The divergence of two policies is the dense one, whatever the portions in which it is found."""

import pytest
import torch

from forklora import divergence
from forklora.divergence import divergences
from forklora.unembed import read_unembedding
from tiny import close
from tiny_policy import llama


def pair():
    generator = torch.Generator().manual_seed(0)
    models = [llama(tied=False), llama(tied=False)]
    with torch.no_grad():
        models[1].lm_head.weight.add_(0.5 * torch.randn(models[1].lm_head.weight.shape, generator=generator))
    heads = tuple(read_unembedding(model, check=False) for model in models)
    hidden = tuple(torch.randn(7, head.width, generator=generator) for head in heads)
    return hidden, heads


def dense(hidden, heads, temperature):
    p, q = (
        (h.double() @ head.weight.detach().double().T / temperature).softmax(-1)
        for h, head in zip(hidden, heads, strict=True)
    )
    return (p * (p / q).log()).sum(-1).float()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("together", [1, 200, 2**24])
def test_it_is_the_dense_sum_over_the_vocabulary(temperature, together, monkeypatch):
    monkeypatch.setattr(divergence, "_TOGETHER", together)
    hidden, heads = pair()
    found = divergences(hidden, heads, temperature=temperature)
    close(found, dense(hidden, heads, temperature))
    assert bool((found > 0).all())


def test_a_policy_is_not_apart_from_itself_and_the_two_directions_differ():
    (one, other), heads = pair()
    assert float(divergences((one, one), (heads[0], heads[0])).abs().max()) < 1e-6
    there, back = divergences((one, other), heads), divergences((other, one), heads[::-1])
    assert not torch.allclose(there, back, rtol=0.01)


def test_its_second_order_is_half_the_variance_of_the_logits_change():
    (hidden, shift), heads = pair()
    size = 1e-2
    found = divergences((hidden, hidden + size * shift), (heads[0], heads[0]))
    probs = heads[0].logits(hidden).softmax(-1)
    moved = size * shift @ heads[0].weight.detach().T
    variance = (probs * moved.square()).sum(-1) - (probs * moved).sum(-1).square()
    assert torch.allclose(found, variance / 2, rtol=0.05)
