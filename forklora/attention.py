"""Attention of completions that share their prompts: a prompt's keys and values are held, and read, once for its group.

Decisions: queries of one key head are multiplied as one block, so that no key or value is ever repeated, neither for
the rows of a group nor for the heads that share it; only the probabilities are kept for the backward pass. On a CPU
this is several times faster than the fused kernel and takes a fraction of its memory. It stands in for transformers'
``sdpa`` and computes the same function; whatever it cannot express it refuses with :class:`CannotShare`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

_MARK = "_forklora_prompts"  # attribute of a key tensor: the prompts that its rows continue
_SCORES = 1 << 22  # scores worked on at a time: what does not stay in a processor's cache is several times slower
_FOREIGN = ("dropout", "softcap", "s_aux", "position_bias", "output_attentions")


class CannotShare(Exception):
    """The attention of a model is not the plain one, or not handed the keys as its cache returned them."""


class Layout(NamedTuple):
    """Which rows share a prompt: groups side by side, each filled up to the size of the largest.

    Attributes:
        groups: number of prompts.
        most: rows of the largest group.
        place: ``[n]`` position of each row among the ``groups * most`` slots.
        plain: every slot is taken and rows stand in order, so that rows and slots are the same.
    """

    groups: int
    most: int
    place: Int[Tensor, " n"]
    plain: bool

    @classmethod
    def of(cls, group: Int[Tensor, " n"], groups: int) -> Layout:
        """The layout of rows that belong to the prompts ``0 .. groups - 1``."""
        rows = torch.arange(len(group), device=group.device)
        counts = group.bincount(minlength=groups)
        order = group.argsort(stable=True)
        rank = torch.empty_like(group)
        rank[order] = rows - (counts.cumsum(0) - counts)[group[order]]
        most = int(counts.max())
        place = group * most + rank
        return cls(groups, most, place, len(group) == groups * most and torch.equal(place, rows))

    def gather(self, rows: Float[Tensor, "n h q x"]) -> Float[Tensor, "g h mq x"]:
        """Rows of a group one below the other, head by head; slots without a row hold zeros."""
        n, heads, length, width = rows.shape
        if not self.plain:
            filled = rows.new_zeros(self.groups * self.most, heads, length, width)
            filled[self.place] = rows
            rows = filled
        split = rows.reshape(self.groups, self.most, heads, length, width)
        return split.transpose(1, 2).reshape(self.groups, heads, self.most * length, width)

    def scatter(self, grouped: Float[Tensor, "g h mq x"]) -> Float[Tensor, "n h q x"]:
        """The inverse of :meth:`gather`."""
        _, heads, length, width = grouped.shape
        split = grouped.reshape(self.groups, heads, self.most, length // self.most, width).transpose(1, 2)
        rows = split.reshape(self.groups * self.most, heads, length // self.most, width)
        return rows if self.plain else rows[self.place]


class Prompts(NamedTuple):
    """Keys and values of one layer for prompts that several rows continue."""

    keys: Float[Tensor, "g h p d"]
    values: Float[Tensor, "g h p e"]
    layout: Layout

    def mark(self, keys: Float[Tensor, "n h t d"]) -> Float[Tensor, "n h t d"]:
        """A tensor of the rows' own keys that leads the attention to what stands before them."""
        marked = keys.view_as(keys)
        setattr(marked, _MARK, self)
        return marked


def shared_attention(
    module: nn.Module,
    query: Float[Tensor, "n hq q d"],
    key: Float[Tensor, "n h t d"],
    value: Float[Tensor, "n h t e"],
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **kwargs: Any,  # noqa: ANN401 - transformers hands over whatever the model knows
) -> tuple[Float[Tensor, "n q hq e"], None]:
    """Attention as transformers asks for it, over the marked prompts and the rows' own keys.

    ``softmax(scaling * q k^T) v`` over the keys that the boolean mask ``[n, 1, q, p + t]`` allows.

    Raises:
        CannotShare: a dropout, cap, sink or bias is asked for, or the mask does not fit the keys.
    """
    prompts: Prompts | None = getattr(key, _MARK, None)
    n, heads, length, _ = query.shape
    before = 0 if prompts is None else prompts.keys.shape[2]
    fits = (n, 1, length, before + key.shape[2])
    if attention_mask is None or attention_mask.dtype != torch.bool or attention_mask.shape != fits:
        found = None if attention_mask is None else (attention_mask.dtype, tuple(attention_mask.shape))
        raise CannotShare(f"{type(module).__name__} brings the mask {found} instead of a boolean one of {fits}.")
    asked = [name for name in _FOREIGN if kwargs.get(name) is not None and kwargs[name] not in (0, False)]
    if asked or heads % key.shape[1]:
        raise CannotShare(f"{type(module).__name__} asks for {asked}, with {heads} heads on {key.shape[1]}.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    narrow = torch.is_autocast_enabled(query.device.type)
    kind = torch.get_autocast_dtype(query.device.type) if narrow else query.dtype
    blocks = query.reshape(n, key.shape[1], -1, query.shape[-1]).to(kind)
    before_them = () if prompts is None else (prompts.keys.to(kind), prompts.values.to(kind))
    with torch.autocast(query.device.type, enabled=False):
        if prompts is None:
            found = _alone(blocks, key.to(kind), value.to(kind), attention_mask, scale=scale)
        else:
            own = (blocks, key.to(kind), value.to(kind))
            found = _AttendShared.apply(*own, *before_them, attention_mask, prompts.layout, scale)
    return found.reshape(n, heads, length, -1).transpose(1, 2).contiguous(), None


def _alone(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float) -> Tensor:
    """Rows that share nothing, a few at a time; the fused kernel where even a single row is too long for that."""
    n, heads, rows, _ = query.shape
    step = _SCORES // (heads * rows * key.shape[2])
    if step == 0:
        whole = query.reshape(n, -1, mask.shape[2], query.shape[-1])
        found = nn.functional.scaled_dot_product_attention(
            whole, key, value, attn_mask=mask, scale=scale, enable_gqa=True
        )
        return found.reshape(n, heads, rows, -1)
    parts = zip(*(t.split(step) for t in (query, key, value, mask)), strict=True)
    return torch.cat([_Attend.apply(*part, scale) for part in parts])


def _softmax(scores: Tensor, mask: Tensor, *, scale: float) -> Tensor:
    """Probabilities in the scores' precision, found in float32 at least; rows that may see nothing stay finite."""
    wide = _wide(scores).mul_(scale)
    n, _, _, length = wide.shape
    wide.view(n, -1, mask.shape[2], length).masked_fill_(~mask, torch.finfo(wide.dtype).min)
    return wide.softmax(-1).to(scores.dtype)


def _slope(probs: Tensor, slope: Tensor, *, scale: float) -> Tensor:
    """Derivative of the loss by the scores, from that by the probabilities."""
    wide = _wide(probs)
    weighed = _wide(slope) * wide
    return weighed.sub_(wide * weighed.sum(-1, keepdim=True)).mul_(scale).to(probs.dtype)


def _wide(numbers: Tensor) -> Tensor:
    return numbers.to(torch.promote_types(numbers.dtype, torch.float32))


class _Attend(torch.autograd.Function):
    """Rows that share nothing; heads with the same keys lie below each other in the rows of the query."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:  # noqa: ANN401 - autograd's own
        query, key, value, mask, ctx.scale = args
        probs = _softmax(query @ key.transpose(-1, -2), mask, scale=ctx.scale)
        ctx.save_for_backward(query, key, value, probs)
        return probs @ value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        query, key, value, probs = ctx.saved_tensors
        slope = _slope(probs, grads[0] @ value.transpose(-1, -2), scale=ctx.scale)
        by_key, by_value = slope.transpose(-1, -2) @ query, probs.transpose(-1, -2) @ grads[0]
        return slope @ key, by_key, by_value, None, None


class _AttendShared(torch.autograd.Function):
    """Rows that continue prompts: the prompts' part by groups, their own part by rows, one softmax over both."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:  # noqa: ANN401
        query, key, value, prompt_key, prompt_value, mask, layout, ctx.scale = args
        shared = layout.scatter(layout.gather(query) @ prompt_key.transpose(-1, -2))
        probs = _softmax(torch.cat([shared, query @ key.transpose(-1, -2)], -1), mask, scale=ctx.scale)
        ctx.save_for_backward(query, key, value, prompt_key, prompt_value, probs)
        ctx.layout, split = layout, prompt_key.shape[2]
        found = layout.scatter(layout.gather(probs[..., :split]) @ prompt_value)
        return found.add_(probs[..., split:] @ value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        query, key, value, prompt_key, prompt_value, probs = ctx.saved_tensors
        (grad,), layout, split = grads, ctx.layout, prompt_key.shape[2]
        grouped = layout.gather(grad)
        shared = layout.scatter(grouped @ prompt_value.transpose(-1, -2))
        slope = _slope(probs, torch.cat([shared, grad @ value.transpose(-1, -2)], -1), scale=ctx.scale)
        grouped_slope, own_slope = layout.gather(slope[..., :split]), slope[..., split:]
        return (
            layout.scatter(grouped_slope @ prompt_key).add_(own_slope @ key),
            own_slope.transpose(-1, -2) @ query,
            probs[..., split:].transpose(-1, -2) @ grad,
            grouped_slope.transpose(-1, -2) @ layout.gather(query),
            layout.gather(probs[..., :split]).transpose(-1, -2) @ grouped,
            None,
            None,
            None,
        )
