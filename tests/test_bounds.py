"""The bounds of theory hold on random policies over a small vocabulary, and break on other data."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forklora.bounds import fork_span, outside_span, spread_bounds
from forklora.forks import candidate_sets, find_forks
from forklora.trace import Trace
from tiny_policy import orthonormal

V, D, N, T = 9, 12, 4, 6
ROWS = torch.randn(V, D, generator=torch.Generator().manual_seed(11))
LARGEST = float(ROWS.norm(dim=1).max())
HEATS = (0.5, 1.0, 1.7)


def record(seed, *, sharpness=3.0, kept=V, temperature=1.0):
    """A trace of random policies, one token drawn at each position, and the policies ``[N, T, V]``."""
    generator = torch.Generator().manual_seed(seed)
    mu = (sharpness * torch.randn(N, T, V, generator=generator)).softmax(-1)
    token = torch.multinomial(mu.flatten(0, 1), 1, generator=generator).view(N, T)
    rows = ROWS / temperature
    mean = mu @ rows
    probs, ids = mu.topk(kept)
    return Trace(
        prompt_ids=torch.zeros(N, 1, dtype=torch.long),
        prompt_mask=torch.ones(N, 1, dtype=torch.bool),
        completion_ids=token,
        completion_mask=torch.arange(T) < torch.tensor([T, T, 3, 0])[:, None],
        candidate_ids=ids,
        candidate_probs=probs,
        leak=(1 - probs.sum(-1)).clamp_min(0),
        logprob=mu.gather(-1, token[..., None])[..., 0].log(),
        group=torch.zeros(N, dtype=torch.long),
        spread=(mu * (rows - mean[..., None, :]).square().sum(-1)).sum(-1),
        delta=rows[token] - mean,
    ), mu


@given(st.integers(0, 10**6), st.sampled_from((0.3, 3.0, 12.0)), st.integers(2, V), st.sampled_from(HEATS))
def test_both_bounds_hold_for_every_policy_also_where_candidates_are_missing(seed, sharpness, kept, temperature):
    trace, _ = record(seed, sharpness=sharpness, kept=kept, temperature=temperature)
    found = spread_bounds(trace, ROWS.__getitem__, largest=LARGEST, temperature=temperature)
    assert len(found.spread) == int(trace.completion_mask.sum()) == 15
    assert found.violations == (0, 0)


def test_the_first_bound_is_the_sum_of_distances_to_the_likeliest_token():
    trace, mu = record(3)
    found = spread_bounds(trace, ROWS.__getitem__, largest=LARGEST)
    apart = (ROWS[:, None] - ROWS[None]).square().sum(-1)  # [a, b]
    expected = (mu * apart[mu.argmax(-1)]).sum(-1)[trace.completion_mask]
    assert torch.allclose(found.near.float(), expected, rtol=1e-4, atol=1e-4)
    far = 4 * LARGEST**2 * (1 - mu.amax(-1))[trace.completion_mask]
    assert torch.allclose(found.far.float(), far, rtol=1e-4, atol=1e-3)


def test_what_belongs_to_other_output_vectors_breaks_them():
    trace, _ = record(3)
    assert spread_bounds(trace, lambda ids: 0.1 * ROWS[ids], largest=LARGEST).violations[0] > 0
    assert spread_bounds(trace, ROWS.__getitem__, largest=0.01 * LARGEST).violations[1] > 0
    with pytest.raises(ValueError, match="record=True"):
        spread_bounds(replace(trace, spread=None), ROWS.__getitem__, largest=LARGEST)


@given(st.integers(0, 10**6), st.sampled_from((0.6, 0.9, 0.98)), st.integers(2, V))
def test_what_lies_outside_the_span_is_bounded_by_the_leak(seed, mass, cap):
    trace, mu = record(seed)
    span = fork_span(find_forks(trace, mass=mass, cap=cap), ROWS.__getitem__)
    leak = candidate_sets(trace, mass=mass, cap=cap).leak
    # in expectation over the drawn token: every token in turn, weighted with its probability
    expected = torch.zeros(N, T, dtype=torch.float64)
    for token in range(V):
        delta = ROWS[token] - mu @ ROWS
        outside = outside_span(
            replace(trace, delta=delta, completion_mask=torch.ones(N, T, dtype=torch.bool)), span.basis
        )
        expected += mu[..., token].double() * outside.view(N, T)
    drawn = trace.completion_mask
    assert (expected <= 4 * LARGEST**2 * leak.double() + 1e-4)[drawn].all()


def test_the_span_is_that_of_all_differences_and_no_larger_than_counted():
    trace, _ = record(5, sharpness=6.0)
    forks = find_forks(trace, mass=0.95)
    span = fork_span(forks, ROWS.__getitem__)
    rows = ROWS.double()
    differences = torch.cat([rows[ids[ids >= 0][1:]] - rows[ids[0]] for ids in forks.ids])
    assert span.basis.shape == (D, int(torch.linalg.matrix_rank(differences))) and len(span.values) <= span.counted
    assert span.counted == len(differences)
    assert torch.allclose(differences @ span.basis @ span.basis.T, differences, atol=1e-5)
    assert torch.allclose(span.basis.T @ span.basis, torch.eye(len(span.values), dtype=torch.float64), atol=1e-9)
    assert span.dimension(1.0) == len(span.values) and 1 <= span.dimension(0.5) <= span.dimension(0.9)
    inside = outside_span(trace, orthonormal(D, D).double())
    assert torch.allclose(inside, torch.zeros_like(inside), atol=1e-10)


def test_pieces_of_many_forks_add_up():
    trace, _ = record(5)
    forks = find_forks(trace)
    many = forks.select([0] * 1500)
    one, all_ = fork_span(forks.select([0]), ROWS.__getitem__), fork_span(many, ROWS.__getitem__)
    assert torch.allclose(all_.values, 1500 * one.values, rtol=1e-6)


def test_no_fork_is_no_span():
    trace, _ = record(5)
    span = fork_span(find_forks(trace, mass=1e-6), ROWS.__getitem__)
    assert span.basis.shape == (D, 0) and span.counted == 0 and span.dimension(0.9) == 0
    assert torch.equal(outside_span(trace, span.basis), trace.delta[trace.completion_mask].double().square().sum(-1))
    with pytest.raises(ValueError, match="record=True"):
        outside_span(trace.without_delta(), span.basis)
