"""The Fisher of a policy is the variance of its score, by autograd through the log probabilities."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed

from forklora.backward import layer_shape, linear_layers
from forklora.fisher import FisherSums, fisher_cap, kronecker_cap, membership, top_coordinates
from forklora.rollouts import Sampler, sample
from ranks import together
from tiny_policy import eager, gpt2, llama, tokenizer

HEAT = 0.8
PROMPTS = ("1 + 1 =", "22 * 3 =")


def rollouts(model, *, group=3, new=4, heat=HEAT):
    asked = [tokenizer()(text)["input_ids"] for text in PROMPTS]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return sample(model, asked, sampler=Sampler(max_new_tokens=new, temperature=heat, stop_ids=(1,)), group=group)


def scores(model, trace, names, heat=HEAT):
    """Gradient of the log probability of each completion by the weight of each layer, by plain autograd."""
    found = {name: [] for name in names}
    modules = dict(model.named_modules())
    weights = [modules[name].weight for name in names]
    for i in range(len(trace)):
        prompt = trace.prompt_ids[i][trace.prompt_mask[i]]
        drawn = trace.completion_ids[i][trace.completion_mask[i]]
        logits = model(torch.cat([prompt, drawn])[None]).logits[0, len(prompt) - 1 : -1] / heat
        logprob = logits.log_softmax(-1).gather(-1, drawn[:, None]).sum()
        for name, gradient in zip(names, torch.autograd.grad(logprob, weights), strict=True):
            transposed = gradient.shape != layer_shape(modules[name]) or type(modules[name]).__name__ == "Conv1D"
            found[name].append(gradient.T if transposed else gradient)
    return {name: torch.stack(gradients) for name, gradients in found.items()}


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def summed(request):
    model = eager(llama(tied=False)) if request.param == "llama" else gpt2()
    trace = rollouts(model)
    advantages = torch.randn(len(trace), generator=torch.Generator().manual_seed(1))
    names = linear_layers(model)
    sums = FisherSums(model, names, factored=names[:2])
    sums.add(model, trace.select([0, 1, 2, 3]), advantages=advantages[:4])
    sums.add(model, trace.select([4, 5]), advantages=advantages[4:])
    return model, trace, advantages, sums


def test_fisher_and_gradient_are_those_of_the_log_probabilities(summed):
    model, trace, advantages, sums = summed
    assert len({int(n) for n in trace.completion_mask.sum(1)}) > 1 or len(PROMPTS[0]) != len(PROMPTS[1])
    expected = scores(model, trace, sums.layers)
    assert sums.layers and set(sums.layers) == set(linear_layers(model)) and sums.count == 6
    for name, score in expected.items():
        assert torch.allclose(
            sums.fisher(name), score.square().mean(0), rtol=1e-3, atol=1e-6 * float(score.abs().max())
        )
        gradient = (advantages[:, None, None] * score).mean(0)
        assert torch.allclose(sums.gradient(name), gradient, rtol=1e-3, atol=1e-5 * float(score.abs().max()))
    assert sums.deviation == pytest.approx(float(advantages.square().mean().sqrt()))


def test_the_cap_holds_on_the_same_completions_and_not_on_any(summed):
    _, _, _, sums = summed
    for name in sums.layers:
        cap = fisher_cap(sums.gradient(name), sums.fisher(name), deviation=sums.deviation)
        assert cap.broken == 0 and cap.energy_broken == 0 and 0 < cap.tightness < 1
        assert fisher_cap(sums.gradient(name), sums.fisher(name), deviation=0.01 * sums.deviation).broken > 0


def test_the_factors_are_means_over_positions_and_know_no_padding(summed):
    model, trace, _, sums = summed
    name = sums.layers[0]
    inputs = []
    handle = dict(model.named_modules())[name].register_forward_hook(lambda _, args, __: inputs.append(args[0][0]))
    with torch.no_grad():
        for i in range(len(trace)):
            drawn = trace.completion_ids[i][trace.completion_mask[i]]
            model(torch.cat([trace.prompt_ids[i][trace.prompt_mask[i]], drawn])[None, :-1])
    handle.remove()
    x = torch.cat(inputs).double()
    assert sums.length == pytest.approx(len(x) / len(trace))
    assert torch.allclose(sums.factors(name)[1], x.T @ x / len(x), rtol=1e-3, atol=1e-5)


def test_the_models_weights_gradients_and_random_state_are_left(summed):
    model, trace, advantages, _ = summed
    state, before = torch.get_rng_state(), [p.clone() for p in model.parameters()]
    FisherSums(model, linear_layers(model)).add(model, trace, advantages=advantages)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(
        p.grad is None and p.requires_grad and torch.equal(p, was)
        for p, was in zip(model.parameters(), before, strict=True)
    )


def test_the_kronecker_cap_is_exact_where_signal_and_input_are_independent():
    """All pairs of a few signals and inputs, one position each: the Fisher is their Kronecker product."""
    generator = torch.Generator().manual_seed(0)
    g, x = torch.randn(4, 3, generator=generator).double(), torch.randn(5, 6, generator=generator).double()
    pairs = list(product(g, x))
    advantages = torch.randn(len(pairs), generator=generator).double()
    gradient = sum(a * torch.outer(*pair) for a, pair in zip(advantages, pairs, strict=True)) / len(pairs)
    factors = g.T @ g / len(g), x.T @ x / len(x)
    deviation = float(advantages.square().mean().sqrt())
    cap = kronecker_cap(gradient, factors, deviation=deviation, length=1.0)
    assert (cap.broken, cap.numbers) == (0, 18) and 0 < cap.tightness < 1
    assert kronecker_cap(gradient, factors, deviation=0.01 * deviation, length=1.0).broken > 0


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.floats(0.01, 1), st.integers(0, 99))
def test_the_largest_coordinates_are_those_of_one_long_list(sizes, share, seed):
    generator = torch.Generator().manual_seed(seed)
    values = {f"layer{i}": torch.rand(n, generator=generator) for i, n in enumerate(sizes)}
    found = top_coordinates(values, share=share)
    kept = max(1, round(share * sum(sizes)))
    everything = torch.cat(list(values.values()))
    chosen = torch.cat([values[name][index] for name, index in found.items()])
    assert torch.equal(chosen.sort().values, everything.sort().values[-kept:])
    assert membership(found, found) == 1.0


def test_membership_is_the_share_that_stayed():
    before = {"a": torch.tensor([1, 2]), "b": torch.tensor([5, 9])}
    assert membership(before, {"a": torch.tensor([2, 3]), "b": torch.tensor([5])}) == 0.5
    assert membership(before, {}) == 0.0
    with pytest.raises(ValueError, match="no coordinates"):
        membership({"a": torch.zeros(0, dtype=torch.long)}, before)


def test_bad_input_is_refused():
    model = llama()
    with pytest.raises(ValueError, match="nowhere"):
        FisherSums(model, ["nowhere"])
    names = linear_layers(model)
    with pytest.raises(ValueError, match="none that are summed"):
        FisherSums(model, names[:1], factored=names[1:2])
    with pytest.raises(ValueError, match="one for each"):
        FisherSums(model, names).add(model, rollouts(model), advantages=torch.ones(2))
    with pytest.raises(ValueError, match="share=0.0"):
        top_coordinates({"a": torch.ones(3)}, share=0.0)


def shared(rows):
    """The sums of all ranks, of which each adds its own rows."""
    model = eager(llama(tied=False))
    trace, sums = rollouts(model), FisherSums(model, linear_layers(model))
    mine = rows[distributed.get_rank()]
    if mine:
        sums.add(model, trace.select(mine), advantages=torch.tensor([float(row) for row in mine]))
    sums.all_reduce()
    found = {name: (sums.fisher(name).tolist(), sums.gradient(name).tolist()) for name in sums.layers}
    return found, sums.count, sums.length, sums.deviation


@pytest.mark.parametrize("rows", [[[0, 1, 2, 3], [4, 5]], [[], [0, 1, 2, 3, 4, 5]]])
def test_ranks_add_up_to_the_sums_of_one_process(rows):
    model = eager(llama(tied=False))
    trace, alone = rollouts(model), FisherSums(model, linear_layers(model))
    alone.add(model, trace, advantages=torch.arange(6.0))
    for found, *numbers in together(shared, rows=rows):
        assert numbers == pytest.approx([alone.count, alone.length, alone.deviation])
        assert set(found) == set(alone.layers)
        for name, pair in found.items():
            for mine, expected in zip(pair, (alone.fisher(name), alone.gradient(name)), strict=True):
                torch.testing.assert_close(torch.tensor(mine), expected, rtol=1e-4, atol=1e-6)
