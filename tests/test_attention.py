"""Laws of the shared attention: softmax attention over each row's own prompt and its own keys, derivatives too."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import tiny
from forklora import attention
from forklora.attention import CannotShare, Layout, Prompts, shared_attention
from tiny import close

WIDTH, HEADS, QUERY_HEADS = 6, 2, 4


def seeded(*shape, seed=0, dtype=torch.float64):
    found = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=dtype)
    return found.requires_grad_(True)


def case(group, *, prompts=3, before=5, length=4, dtype=torch.float64):
    """Query, own keys and values, the prompts' keys and values, and a mask with padding on both sides."""
    n = len(group)
    own = [seeded(n, HEADS, length, WIDTH + i, seed=i, dtype=dtype) for i in (0, 1)]
    first = [seeded(prompts, HEADS, before, WIDTH + i, seed=5 + i, dtype=dtype) for i in (0, 1)]
    query = seeded(n, QUERY_HEADS, length, WIDTH, seed=9, dtype=dtype)
    mask = torch.ones(n, 1, length, before + length, dtype=torch.bool)
    mask[..., before:] = torch.ones(length, length, dtype=torch.bool).tril()
    mask[0, ..., :2] = False
    return query, own, first, mask


def dense(query, own, first, *, mask, group, scale):
    """The reference: every row gets a copy of its prompt, every query head a copy of its keys."""
    key, value = (torch.cat([f[group], o], 2) for f, o in zip(first, own, strict=True))
    share = QUERY_HEADS // HEADS
    key, value = (x.repeat_interleave(share, 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * scale
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("group", [[0, 0, 1, 1, 2, 2], [2, 0, 0, 1, 0], [1, 1, 1], [0, 2]])
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_it_is_softmax_attention_over_copied_prompts_and_so_are_its_derivatives(group, scaling):
    group = torch.tensor(group)
    query, own, first, mask = case(group)
    marked = Prompts(*first, Layout.of(group, 3)).mark(own[0])
    found, weights = shared_attention(nn.Identity(), query, marked, own[1], mask, scaling=scaling)
    scale = WIDTH**-0.5 if scaling is None else scaling
    expected = dense(query, own, first, mask=mask, group=group, scale=scale)
    assert weights is None
    close(found, expected, 1e-12)
    pull = seeded(*expected.shape, seed=3).detach()
    inputs = [query, *own, *first]
    for one, other in zip(
        torch.autograd.grad((found * pull).sum(), inputs),
        torch.autograd.grad((expected * pull).sum(), inputs),
        strict=True,
    ):
        close(one, other, 1e-12)


@pytest.mark.parametrize("alive", [1 << 22, 200, 1])
def test_rows_that_share_nothing_are_plain_attention_however_they_are_split(alive, monkeypatch):
    monkeypatch.setattr(attention, "_SCORES", alive)
    query, own, _, mask = case([0, 1, 2, 0], before=0, dtype=torch.float32)
    mask = mask | torch.eye(4, dtype=torch.bool)  # row 0 lost its first columns: nothing may be left to see
    found, _ = shared_attention(nn.Identity(), query, own[0], own[1], mask)
    expected = scaled_dot_product_attention(query, own[0], own[1], attn_mask=mask, enable_gqa=True).transpose(1, 2)
    close(found, expected)
    inputs = [query, *own]
    for one, other in zip(
        torch.autograd.grad(found.square().sum(), inputs),
        torch.autograd.grad(expected.square().sum(), inputs),
        strict=True,
    ):
        close(one, other)


def test_a_position_that_may_see_nothing_is_finite_and_gives_no_gradient_elsewhere():
    query, own, _, mask = case([0, 1], before=0)
    mask[0] = False
    found, _ = shared_attention(nn.Identity(), query, own[0], own[1], mask)
    assert found.isfinite().all()
    grads = torch.autograd.grad(found[1].sum(), [query, *own])
    assert all(g.isfinite().all() and (g[0] == 0).all() for g in grads)


@pytest.mark.parametrize("group", [[0, 0, 1, 1], [1, 0, 1], [0, 1], [2, 2, 0]])
def test_a_layout_gathers_groups_and_scatters_them_back(group):
    layout, rows = Layout.of(torch.tensor(group), 3), seeded(len(group), HEADS, 2, WIDTH).detach()
    together = layout.gather(rows)
    assert torch.equal(layout.scatter(together), rows)
    for number in range(3):
        members = [i for i, g in enumerate(group) if g == number]
        mine = together[number]
        for head in range(HEADS):
            expected = torch.cat([rows[i, head] for i in members]) if members else rows[:0, 0, 0]
            assert torch.equal(mine[head, : len(expected)], expected)
            assert (mine[head, len(expected) :] == 0).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dropout": 0.1}, "dropout"),
        ({"softcap": 30.0}, "softcap"),
        ({"s_aux": 1.0}, "s_aux"),
        ({"attention_mask": None}, "the mask None"),
        ({"attention_mask": torch.zeros(2, 1, 4, 4)}, "torch.float32"),
        ({"attention_mask": torch.ones(2, 1, 4, 9, dtype=torch.bool)}, r"\(2, 1, 4, 9\)"),
    ],
)
def test_what_it_cannot_express_it_refuses(changes, words):
    query, own, _, mask = case([0, 1], before=0)
    with pytest.raises(CannotShare, match=words):
        shared_attention(nn.Identity(), query, *own, **{"attention_mask": mask} | changes)


def test_keys_that_lost_their_prompts_are_refused_not_read_without_them():
    group = torch.tensor([0, 1, 1])
    query, own, first, mask = case(group)
    marked = Prompts(*first, Layout.of(group, 3)).mark(own[0])
    with pytest.raises(CannotShare, match="instead of a boolean one"):
        shared_attention(nn.Identity(), query, marked * 1.0, own[1], mask)


def test_in_bfloat16_it_is_as_near_to_float32_as_plain_attention():
    group = torch.tensor([0, 0, 1, 2, 2])
    query, own, first, mask = case(group, dtype=torch.float32)
    exact = dense(query, own, first, mask=mask, group=group, scale=WIDTH**-0.5)
    low = [x.detach().bfloat16() for x in (query, *own, *first)]
    marked = Prompts(low[3], low[4], Layout.of(group, 3)).mark(low[1])
    found, _ = shared_attention(nn.Identity(), low[0], marked, low[2], mask)
    plain = dense(low[0], low[1:3], low[3:], mask=mask, group=group, scale=WIDTH**-0.5)
    assert found.dtype == torch.bfloat16
    assert (found - exact).norm() < 1.5 * (plain - exact).norm()


def test_tiny_models_say_which_of_them_share():
    from forklora.cache import can_share

    assert {kind for kind in tiny.KINDS if can_share(tiny.model(kind))} == set(tiny.KINDS) - {"gemma2"}


def test_under_autocast_everything_is_narrow_and_the_way_back_needs_no_autocast():
    group = torch.tensor([0, 0, 1, 2, 2])
    query, own, first, mask = case(group, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        marked = Prompts(first[0], first[1].bfloat16(), Layout.of(group, 3)).mark(own[0])
        found, _ = shared_attention(nn.Identity(), query, marked, own[1].bfloat16(), mask)
        alone, _ = shared_attention(nn.Identity(), query, own[0].bfloat16(), own[1], mask[..., 5:])
    assert found.dtype == alone.dtype == torch.bfloat16
    grads = torch.autograd.grad(found.sum() + alone.sum(), [query, *own, *first])
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in grads)
    exact = dense(query, own, first, mask=mask, group=group, scale=WIDTH**-0.5)
    assert (found - exact).norm() < 0.02 * exact.norm()
