"""What the controls read their bases from: the signal alone is changed, and in what."""

from dataclasses import fields, replace
from itertools import permutations

import pytest
import torch
from forklora.recipes.controls import confident, control, shuffled

import tiny
from forklora.forks import find_forks
from forklora.rollouts import Sampler, sample
from forklora.unembed import read_unembedding

SAMPLER = Sampler(max_new_tokens=5, stop_ids=(2,))


def recorded(kind="llama", *, sharpness=2.0, sampler=SAMPLER, words=tiny.WORDS):
    """A trace of a tiny model with confident positions and forks, and the model's head."""
    net = tiny.model(kind, sharpness=sharpness)
    head = read_unembedding(net, tiny.tokenizer(words), check=False)
    torch.manual_seed(0)
    return sample(net, tiny.prompts((3, 5, 4)), sampler=sampler, group=6, unembedding=head), head


def same_but_signal(trace, other):
    for field in fields(trace):
        one, two = getattr(trace, field.name), getattr(other, field.name)
        if field.name != "delta":
            assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two


def test_forks_need_no_change():
    assert control("forks", seed=0) is None


def test_confident_positions_have_their_own_signal_and_forks_none():
    trace, head = recorded()
    found = control("confident", seed=0)(trace, head)
    forks = torch.zeros(trace.completion_mask.shape, dtype=torch.bool)
    at = find_forks(trace)
    forks[at.rows, at.positions] = True
    assert forks.any() and (trace.completion_mask & ~forks).any()
    assert not found.delta[forks].any()
    assert torch.equal(found.delta[~forks], trace.delta[~forks])
    assert found.delta[trace.completion_mask].any()
    same_but_signal(trace, found)
    assert trace.delta[forks].any()  # what was recorded is as it was


@pytest.mark.parametrize("kind", ["llama", "padded"])
def test_shuffled_signals_have_the_norms_of_the_forks_and_another_direction(kind):
    trace, head = recorded(kind)
    found = shuffled(trace, head, seed=1)
    where = trace.completion_mask
    tiny.close(found.delta[where].norm(dim=-1), trace.delta[where].norm(dim=-1), 1e-5)
    assert not found.delta[~where].any()
    same_but_signal(trace, found)
    cosine = torch.nn.functional.cosine_similarity(found.delta[where], trace.delta[where], dim=-1)
    assert cosine.abs().mean() < 0.7
    assert find_forks(found).rows.tolist() == find_forks(trace).rows.tolist()


def test_the_seed_alone_decides_which_tokens_are_exchanged():
    trace, head = recorded()
    first = control("shuffled", seed=1)(trace, head).delta
    torch.manual_seed(99)
    assert torch.equal(first, shuffled(trace, head, seed=1).delta)
    assert not torch.allclose(first, shuffled(trace, head, seed=2).delta, atol=1e-3)


def test_shuffled_signals_are_made_of_valid_tokens_in_one_order_for_all_positions():
    """Against every permutation of the valid tokens: exactly one explains all positions."""
    words = tiny.WORDS[:5]
    trace, head = recorded("padded", words=words, sampler=Sampler(max_new_tokens=3, keep=5))
    valid = head.valid_ids.tolist()
    assert len(valid) < head.weight.shape[0]
    found = shuffled(trace, head, seed=3)
    where = trace.completion_mask
    vectors, norms = head.weight.detach().float(), trace.delta[where].norm(dim=-1, keepdim=True)

    def explains(order):
        to = torch.arange(head.weight.shape[0])
        to[valid] = torch.tensor(order)
        probs = trace.candidate_probs[where]
        ids = to[trace.candidate_ids[where].clamp_min(0)]
        mean = (probs[..., None] * vectors[ids]).sum(1) / probs.sum(-1, keepdim=True)
        made = vectors[to[trace.completion_ids[where]]] - mean
        made = made / made.norm(dim=-1, keepdim=True) * norms
        return torch.allclose(made, found.delta[where], atol=1e-4)

    explaining = [order for order in permutations(valid) if explains(order)]
    assert len(explaining) == 1 and explaining[0] != tuple(valid)


@pytest.mark.parametrize("change", [confident, lambda t, h: shuffled(t, h, seed=0)], ids=["confident", "shuffled"])
def test_a_trace_without_a_signal_is_refused(change):
    trace, head = recorded()
    with pytest.raises(ValueError, match="no backward signal"):
        change(replace(trace, delta=None), head)
