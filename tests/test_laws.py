"""Laws of the method on a head one can enumerate: ``h = M x``, two tokens, every completion with its probability.

Prefixes are the start and each first token; the inputs ``x`` of the map ``M`` belong to the prefix. Some prefixes are
sure, some are forks. Numbers of sections are those of "Low-rank in hidden space".
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import product

import pytest
import torch
from torch import nn

from forklora.forks import candidate_sets, find_forks, span_differences
from forklora.trace import Trace
from forklora.unembed import Unembedding
from tiny import close

V, WIDTH, INPUT = 6, 9, 12
PREFIXES = V + 1  # the start, then one per first token


@dataclass
class Tree:
    """All two-token completions of one prompt: sampler, inputs and the head that the sampler was read from."""

    head: Unembedding
    m: torch.Tensor
    inputs: torch.Tensor  # [prefixes, INPUT]
    mu: torch.Tensor  # [prefixes, V], what was drawn from
    signal: torch.Tensor  # A of each completion [V, V]

    @cached_property
    def probability(self):
        return self.mu[0, :, None] * self.mu[1:]

    @cached_property
    def delta(self):
        """``[prefixes, V, WIDTH]``: what the sampler records for each token it may draw."""
        logits = self.head.logits(self.inputs @ self.m.T)
        drawn = [self.head.signal(self.mu, torch.full((PREFIXES,), y), logits=logits) for y in range(V)]
        return torch.stack([delta for delta, _ in drawn], 1)

    def visits(self):
        """Probability of each prefix."""
        return torch.cat([torch.ones(1), self.mu[0]])

    def trace(self):
        """Every completion with probability, one row each."""
        rows = [(a, b) for a, b in product(range(V), repeat=2) if self.probability[a, b] > 0]
        mu = torch.stack([torch.stack([self.mu[0], self.mu[1 + a]]) for a, _ in rows])
        probs, ids = mu.topk(V)
        tokens = torch.tensor(rows)
        return Trace(
            prompt_ids=torch.zeros(len(rows), 1, dtype=torch.long),
            prompt_mask=torch.ones(len(rows), 1, dtype=torch.bool),
            completion_ids=tokens,
            completion_mask=torch.ones(len(rows), 2, dtype=torch.bool),
            candidate_ids=torch.where(probs > 0, ids, -1),
            candidate_probs=probs,
            leak=torch.zeros(len(rows), 2),
            logprob=mu.gather(-1, tokens[..., None])[..., 0].log(),
            spread=torch.zeros(len(rows), 2),
            group=torch.zeros(len(rows), dtype=torch.long),
        )


def tree(seed, truncated=False):
    """A random tree; truncated: each prefix gives probability to its two likeliest tokens only."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    head = nn.Linear(WIDTH, V, bias=False)
    head.weight.data = 0.5 * random(V, WIDTH)
    m, inputs = random(WIDTH, INPUT) / INPUT**0.5, random(PREFIXES, INPUT)
    inputs[1::2] *= 6  # sure prefixes
    mu = (inputs @ m.T @ head.weight.T).softmax(-1).detach()
    if truncated:
        kept = torch.zeros_like(mu).scatter(-1, mu.topk(2).indices, 1.0)
        mu = mu * kept / (mu * kept).sum(-1, keepdim=True)
    return Tree(Unembedding(head, 1.0, None, True, torch.arange(V)), m, inputs, mu, random(V, V))


def expected_update(t, extra=None):
    """``G_M = E[A sum_t delta_t x_t^T]``; ``extra [prefixes]`` is added to the signal at each prefix."""
    found = torch.zeros(WIDTH, INPUT)
    extra = torch.zeros(PREFIXES) if extra is None else extra
    for a, b in product(range(V), repeat=2):
        for prefix, token in ((0, a), (1 + a, b)):
            signal = t.signal[a, b] + extra[prefix]
            found += t.probability[a, b] * signal * torch.outer(t.delta[prefix, token], t.inputs[prefix])
    return found


def rank(m):
    return int(torch.linalg.matrix_rank(m.double(), rtol=1e-4))


def split(t, mass):
    """Differences that span ``D``, the projector on it, candidate counts and leaks by prefix."""
    trace = t.trace()
    differences = span_differences(find_forks(trace, mass=mass), t.head.rows)
    _, values, basis = torch.linalg.svd(differences.double(), full_matrices=False)
    basis = basis[values > 1e-5 * values.max()].float()
    sets, first = candidate_sets(trace, mass=mass), trace.completion_ids[:, 0]
    size, leak = torch.zeros(PREFIXES, dtype=torch.long), torch.zeros(PREFIXES)
    size[0], leak[0] = sets.size[0, 0], sets.leak[0, 0]
    size[1 + first], leak[1 + first] = sets.size[:, 1], sets.leak[:, 1]
    return differences, basis.T @ basis, size, leak


def bound_on_rows(t):
    return t.head.weight.norm(dim=1).max()


@pytest.mark.parametrize("mass", [0.5, 0.6])
@pytest.mark.parametrize("seed", range(4))
def test_the_update_s_main_part_has_no_more_directions_than_the_forks(seed, mass):
    t = tree(seed)
    differences, p, size, _ = split(t, mass)
    g = expected_update(t)
    assert rank(p @ g) <= rank(differences) <= (size - 1).clamp_min(0).sum()
    close(p @ g + (torch.eye(WIDTH) - p) @ g, g)
    assert 0 < rank(differences) < rank(g), "the case is idle: the forks span nothing, or everything"


@pytest.mark.parametrize("mass", [0.5, 0.8, 0.98])
@pytest.mark.parametrize("seed", range(4))
def test_what_leaks_out_of_the_span_is_bounded_by_the_mass_outside_the_candidates(seed, mass):
    t = tree(seed)
    _, p, _, leak = split(t, mass)
    outside, size = torch.eye(WIDTH) - p, bound_on_rows(t)
    bound = t.signal.abs().max() * (t.visits() * 4 * size * leak * t.inputs.norm(dim=1)).sum()
    assert (outside @ expected_update(t)).norm() <= bound
    each = (t.mu * (t.delta @ outside).square().sum(-1)).sum(-1)
    assert (each <= 4 * size**2 * leak + 1e-6).all()


@pytest.mark.parametrize("seed", range(4))
def test_candidates_that_hold_all_the_mass_leak_nothing(seed):
    t = tree(seed, truncated=True)
    differences, p, _, leak = split(t, 1.0)
    g = expected_update(t)
    assert leak.max() < 1e-6 and ((torch.eye(WIDTH) - p) @ g).norm() < 1e-5 * g.norm()
    assert rank(g) <= rank(differences)


@pytest.mark.parametrize("seed", range(4))
def test_the_spread_is_the_expected_square_and_small_where_the_sampler_is_sure(seed):
    t = tree(seed)
    _, spread = t.head.signal(t.mu, t.mu.argmax(-1), logits=torch.zeros_like(t.mu))
    close((t.mu * t.delta.square().sum(-1)).sum(-1), spread)
    about_top = (t.head.weight[None] - t.head.weight[t.mu.argmax(-1)][:, None]).square().sum(-1)
    assert (spread <= (t.mu * about_top).sum(-1) * (1 + 1e-5)).all()
    assert (spread <= 4 * bound_on_rows(t) ** 2 * (1 - t.mu.max(-1).values) + 1e-6).all()
    assert (torch.einsum("sv,svd->sd", t.mu, t.delta).abs() < 1e-5).all()


@pytest.mark.parametrize("seed", range(4))
def test_a_signal_added_at_a_prefix_changes_no_expected_update(seed):
    t, extra = tree(seed), 10 * torch.arange(PREFIXES)
    close(expected_update(t, extra), expected_update(t), 1e-4)
    t.signal = torch.ones(V, V)
    assert expected_update(t).abs().max() < 1e-5


@pytest.mark.parametrize("seed", range(4))
def test_lora_s_first_gradient_lies_in_the_update_s_column_space(seed):
    """``h = (M + U V^T) x`` with ``U = 0``: the gradient by U is ``-G_M V``, the one by V is nothing."""
    t = tree(seed, truncated=True)
    u = torch.zeros(WIDTH, 2, requires_grad=True)
    v = torch.randn(INPUT, 2, generator=torch.Generator().manual_seed(9)).requires_grad_(True)
    hidden = t.inputs @ (t.m + u @ v.T).T
    loss = 0.0
    for a, b in product(range(V), repeat=2):
        score = t.delta[0, a] @ hidden[0] + t.delta[1 + a, b] @ hidden[1 + a]
        loss = loss - t.probability[a, b] * t.signal[a, b] * score
    by_u, by_v = torch.autograd.grad(loss, (u, v))
    g = expected_update(t)
    close(by_u, -g @ v.detach())
    assert (by_v == 0).all()
    left, values, _ = torch.linalg.svd(g)
    columns = left[:, : int((values > 1e-4 * values[0]).sum())]
    assert columns.shape[1] < WIDTH
    close(columns @ columns.T @ by_u, by_u)


@pytest.mark.parametrize("seed", range(4))
def test_every_coefficient_of_the_update_is_capped_by_the_signal_and_the_fisher(seed):
    """``|w^T G| <= std(A) sqrt(w^T F w)`` along every coordinate and along random directions (section 5)."""
    t, generator = tree(seed), torch.Generator().manual_seed(4)
    mean = (t.probability * t.signal).sum()
    deviation = (t.probability * (t.signal - mean).square()).sum().sqrt()
    directions = torch.cat([torch.eye(WIDTH * INPUT), torch.randn(20, WIDTH * INPUT, generator=generator)]).view(
        -1, WIDTH, INPUT
    )
    step = torch.einsum("nij,svi,sj->nsv", directions, t.delta, t.inputs)
    score = step[:, 0, :, None] + step[:, 1:]
    fisher = torch.einsum("ab,nab->n", t.probability, score.square())
    coefficient = torch.einsum("nij,ij->n", directions, expected_update(t))
    close(torch.einsum("ab,nab->n", t.probability * t.signal, score), coefficient)
    assert (coefficient.abs() <= deviation * fisher.sqrt() * (1 + 1e-4) + 1e-6).all()
