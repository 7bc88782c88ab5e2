"""Laws of the centered loss and its relatives, by enumeration of a small vocabulary (method: the centered score)."""

from itertools import product

import pytest
import torch

import tiny
from forklora.losses import TAILS, centering_weights, dense_loss, per_batch, prefix_value, signal_loss
from forklora.unembed import read_unembedding
from tiny import HIDDEN, KINDS, VOCABULARY, close, gradients

PREFIX = torch.tensor([[1, 5, 3, 9]])
ROOT = torch.Generator().manual_seed


def top_p(mu, mass=0.8):
    """The smallest set reaching the mass, renormalized, written apart from the sampler."""
    values, order = mu.sort(-1, descending=True)
    kept = torch.where(values.cumsum(-1) - values < mass, values, 0.0)
    return torch.zeros_like(mu).scatter(-1, order, kept / kept.sum(-1, keepdim=True))


# The trained policy's logits and the sampler, both from the model's own logits z.
SAMPLERS = {
    "same": lambda z: (z, z.softmax(-1)),
    "temperature": lambda z: (z / 1.7, (z / 1.7).softmax(-1)),
    "top_p": lambda z: (z / 0.7, top_p((z / 0.7).softmax(-1))),
    "stale": lambda z: (z, (0.3 * z.flip(-1)).softmax(-1)),
    "forbidden": lambda z: (z.index_fill(-1, torch.tensor([2, 5]), -torch.inf),) * 2,
}


def policy(net, kind):
    z, mu = SAMPLERS[kind](net(input_ids=PREFIX).logits[:, -1:])
    return z, (mu.softmax(-1) if kind == "forbidden" else mu).detach()


def centered(z, mu, y, advantage=1.0):
    token, signal = torch.tensor([[y]]), torch.full((1, 1), advantage)
    loss = dense_loss(z, token, sampler=mu, advantages=signal).sum()
    assert loss.isfinite()
    return loss


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("kind", ["llama", "gemma2", "phi"])
def test_the_centered_score_has_mean_zero_for_every_parameter(kind, sampler):
    """A constant signal gives expected gradient zero, whatever the policy; so does one added to any other signal."""
    net = tiny.model(kind)
    z, mu = policy(net, sampler)
    tokens = mu[0, 0].nonzero()[:, 0].tolist()
    each = torch.stack([gradients(net, centered(z, mu, y)) for y in tokens])
    assert each.abs().max() > 0.1 and each.isfinite().all()
    weight = mu[0, 0, tokens].double()
    assert (weight @ each).norm() < 1e-5 * (weight @ each.abs()).norm()


@pytest.mark.parametrize("advantage", [1.0, -0.3])
@pytest.mark.parametrize("sampler", ["same", "temperature", "forbidden"])
def test_on_policy_the_gradient_is_reinforce_sample_by_sample(sampler, advantage):
    net = tiny.model()
    z, mu = policy(net, sampler)
    for y in mu[0, 0].nonzero()[:, 0].tolist():
        reinforce = gradients(net, -advantage * z.log_softmax(-1)[0, 0, y])
        close(gradients(net, centered(z, mu, y, advantage)), reinforce)


def test_off_policy_the_two_differ():
    net = tiny.model()
    z, mu = policy(net, "stale")
    gap = gradients(net, centered(z, mu, 3)) - gradients(net, -z.log_softmax(-1)[0, 0, 3])
    assert gap.norm() > 0.1


def test_the_loss_is_linear_in_the_logits_and_unbounded():
    """It holds no softmax of the policy: twice the logits are twice the loss, with no end."""
    z = torch.randn(2, 3, 5, generator=ROOT(0))
    arguments = torch.tensor([[0, 1, 2], [3, 4, 0]]), torch.tensor([[1.0], [-2.0]])
    mu = torch.randn(2, 3, 5, generator=ROOT(1)).softmax(-1)
    once, million = (dense_loss(s * z, arguments[0], sampler=mu, advantages=arguments[1]) for s in (1, 1e6))
    close(million, 1e6 * once)
    shifted = dense_loss(z + torch.randn(2, 3, 1, generator=ROOT(2)), arguments[0], sampler=mu, advantages=arguments[1])
    close(shifted, once)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_recorded_signal_replaces_the_vocabulary(kind, dtype, tolerance):
    """Same gradient at the sampling point, with a soft cap too; without one the same loss differences everywhere."""
    head, temperature = read_unembedding(tiny.model(kind, dtype=dtype)), 1.3
    hidden = torch.randn(2, 6, HIDDEN, generator=ROOT(3)).requires_grad_(True)
    z = head.logits(hidden) / temperature
    mu = (0.8 * z).softmax(-1).detach()
    tokens = mu.flatten(0, 1).multinomial(1, generator=ROOT(4)).view(2, 6)
    logits = (temperature * z).detach().flatten(0, 1)
    delta, _ = head.signal(mu.flatten(0, 1), tokens.flatten(), logits=logits)
    delta = delta.view(2, 6, -1) / temperature
    advantages = torch.randn(2, 6, generator=ROOT(5))

    def losses(h):
        dense = dense_loss(head.logits(h) / temperature, tokens, sampler=mu, advantages=advantages)
        return dense, signal_loss(h, delta, advantages=advantages)

    dense, signal = (torch.autograd.grad(loss.sum(), hidden)[0] for loss in losses(hidden))
    close(signal, dense, tolerance)
    if kind != "gemma2":
        (dense, signal), (dense_2, signal_2) = losses(hidden), losses(hidden.flip(1))
        close(signal_2 - signal, dense_2 - dense, tolerance)


def test_a_signal_per_row_is_the_same_signal_at_every_token():
    hidden, delta = torch.randn(2, 3, 4, 5, generator=ROOT(6))
    row = torch.tensor([[0.5], [-1.0], [2.0]])
    assert torch.equal(
        signal_loss(hidden, delta, advantages=row), signal_loss(hidden, delta, advantages=row.expand(3, 4))
    )


def head_gradient(z, y, b, ids):
    """``grad log p(y) - sum_k b_k grad log p(k)`` by the logits."""
    logp = z.log_softmax(-1)
    return torch.autograd.grad(logp[y] - (b * logp[ids]).sum(), z)[0]


@pytest.mark.parametrize("tail", TAILS)
def test_a_complete_head_gives_the_centered_score_under_any_policy(tail):
    z = torch.randn(7, generator=ROOT(7)).requires_grad_(True)
    q, ids = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([4, 1, 6, 0])
    b = centering_weights(q[None, None], z.log_softmax(-1)[ids][None, None].detach(), tail=tail)[0, 0]
    expected = -torch.zeros(7).scatter(0, ids, q)
    expected[2] += 1
    close(head_gradient(z, 2, b, ids), expected)


def test_the_proportional_tail_is_exact_for_a_sampler_that_is_proportional_there():
    """Outside the head the sampler is rho p: then the b of the head alone centers the whole score."""
    z = torch.randn(7, generator=ROOT(8)).requires_grad_(True)
    p, ids = z.softmax(-1).detach(), torch.tensor([4, 1, 6])
    q = torch.tensor([0.4, 0.3, 0.1])
    mu = (1 - q.sum()) / (1 - p[ids].sum()) * p
    mu[ids] = q
    b = centering_weights(q[None, None], p[ids].log()[None, None], tail="proportional")[0, 0]
    scores = torch.stack([head_gradient(z, y, b, ids) for y in range(7)])
    assert (mu @ scores).abs().max() < 1e-6
    dropped = torch.stack([head_gradient(z, y, q, ids) for y in range(7)])
    assert (mu @ dropped).abs().max() > 1e-2


def test_untruncated_and_on_policy_the_proportional_tail_is_plain_reinforce():
    logp = torch.randn(2, 3, 9, generator=ROOT(9)).log_softmax(-1).sort(-1, descending=True).values[..., :4]
    assert centering_weights(logp.exp(), logp, tail="proportional").abs().max() < 1e-6


def test_unused_slots_count_nothing():
    q, junk = torch.tensor([[[0.6, 0.3, 0.0]]]), torch.tensor([[[-0.5, -1.0, float("nan")]]])
    found = centering_weights(q, junk, tail="proportional")
    assert torch.equal(found[..., :2], centering_weights(q[..., :2], junk[..., :2], tail="proportional"))
    assert found[..., 2] == 0


def test_an_incomplete_head_is_never_called_exact():
    q = torch.tensor([[[0.6, 0.3]]])
    with pytest.raises(ValueError, match="leave up to 0.1 of the sampler's mass out"):
        centering_weights(q, q.log(), tail="exact")
    assert torch.equal(centering_weights(q, q.log(), tail="dropped"), q)
    with pytest.raises(ValueError, match="exact, proportional, dropped"):
        centering_weights(q, q.log(), tail="whole")


def slow_values(advantages, tokens, *, mask, group):
    found = torch.zeros(tokens.shape, dtype=advantages.dtype)
    for (i, row), t in product(enumerate(tokens.tolist()), range(tokens.shape[1])):
        others = [
            advantages[j]
            for j in range(len(tokens))
            if j != i and group[j] == group[i] and mask[j, t] and tokens[j, :t].tolist() == row[:t]
        ]
        if mask[i, t] and others:
            found[i, t] = torch.stack(others).mean()
    return found


@pytest.mark.parametrize("tool", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_prefix_value_is_the_mean_of_the_others_that_share_the_prefix(seed, tool):
    """Also behind tokens that a tool put in, where nobody drew: the prefix is still what it was."""
    generator = ROOT(seed)
    tokens = torch.randint(3, (24, 5), generator=generator)
    mask = torch.arange(5) < torch.randint(1, 6, (24, 1), generator=generator)
    if tool:
        tokens[:, 1], mask[:, 1] = 7, False
    group = torch.randint(3, (24,), generator=generator)
    advantages = torch.randn(24, dtype=torch.float64, generator=generator)
    found = prefix_value(advantages, tokens, mask=mask, group=group)
    close(found, slow_values(advantages, tokens, mask=mask, group=group), 1e-12)
    order = torch.randperm(24, generator=generator)
    moved = prefix_value(advantages[order], tokens[order], mask=mask[order], group=group[order])
    close(moved, found[order], 1e-12)


def test_with_the_prefix_value_the_expected_update_is_the_true_policy_gradient():
    """Every pair of rollouts of a two-step tree, where token 0 ends a row, weighed with its probability."""
    theta = torch.randn(4, 3, dtype=torch.float64, generator=ROOT(11)).requires_grad_(True)  # state: start, or token
    sequences = [(0,), *product((1, 2), range(3))]
    reward = torch.randn(len(sequences), dtype=torch.float64, generator=ROOT(12))
    logp = theta.log_softmax(-1)
    parts = [
        torch.stack([logp[0, s[0]], *(logp[1 + a, b] for a, b in [s] if len(s) == 2)]) if len(s) == 2 else logp[0, :1]
        for s in sequences
    ]
    probability = torch.stack([p.sum().exp() for p in parts])
    truth = torch.autograd.grad((probability * reward).sum(), theta, retain_graph=True)[0]
    expected = torch.zeros_like(theta)
    for pair in product(range(len(sequences)), repeat=2):
        tokens = torch.tensor([(*sequences[i], 9)[:2] for i in pair])
        mask = torch.tensor([[True, len(sequences[i]) == 2] for i in pair])
        value = prefix_value(reward[list(pair)], tokens, mask=mask, group=torch.zeros(2, dtype=torch.long))
        loss = sum(((reward[i] - v[: len(parts[i])]) * parts[i]).sum() for i, v in zip(pair, value, strict=True)) / 2
        weight = probability[list(pair)].prod().detach()
        expected += weight * torch.autograd.grad(loss, theta, retain_graph=True)[0]
    close(expected, truth, 1e-12)


def trl_normalizations(loss, mask, *, longest, items):
    """The four formulas as TRL's GRPOTrainer states them for one micro-batch without accumulation."""
    return {
        "grpo": ((loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean(),
        "bnpo": (loss * mask).sum() / mask.sum().clamp(min=1.0),
        "dr_grpo": (loss * mask).sum() / (loss.size(0) * longest),
        "dapo": (loss * mask).sum() / items,
    }


@pytest.mark.parametrize("items", [11.0, torch.tensor(11)])
@pytest.mark.parametrize("kind", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_one_number_per_batch_as_in_trl(kind, items):
    loss = torch.randn(4, 6, generator=ROOT(13))
    mask = torch.arange(6) < torch.tensor([[6], [2], [0], [4]])
    expected = trl_normalizations(loss, mask, longest=9, items=items)[kind]
    found = per_batch(loss.masked_fill(~mask, torch.nan), mask, kind=kind, longest=9, items=items)
    close(found, expected)
    nothing = per_batch(loss, torch.zeros_like(mask), kind=kind, longest=9, items=items)
    assert nothing == 0


def test_an_unknown_normalization_is_named():
    with pytest.raises(ValueError, match="kind='luspo' is not one of grpo, bnpo, dr_grpo, dapo"):
        per_batch(torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), kind="luspo", longest=1, items=1.0)


def test_the_gradient_of_the_head_itself_is_centered_too():
    net = tiny.model()
    z, mu = policy(net, "stale")
    each = [
        torch.autograd.grad(centered(z, mu, y), net.lm_head.weight, retain_graph=True)[0] for y in range(VOCABULARY)
    ]
    mean = torch.einsum("v,vad->ad", mu[0, 0], torch.stack(each))
    assert mean.abs().max() < 1e-6 < 1e-2 < torch.stack(each).abs().max()
