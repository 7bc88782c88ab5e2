"""Adds a low-rank term to the output of a layer in one pass over it, without widening either to float32.

Decisions: the term is one product that adds to the output, in place of a product, a scaling, a sum and a cast; a factor
that is wider than the layer loses nothing of its digits before it meets the input, and its gradient is summed in its
own precision; precisions are chosen here, under autocast too.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def add_low_rank(
    result: Float[Tensor, "*n o"],
    x: Float[Tensor, "*n i"],
    *,
    a: Float[Tensor, "r i"],
    b: Float[Tensor, "o r"],
    scaling: float,
) -> Float[Tensor, "*n o"]:
    """``result + scaling * b (a x)`` in the precision of ``result``, with gradients to all four tensors."""
    with torch.autocast(x.device.type, enabled=False):
        return _AddLowRank.apply(result, x, a, b, scaling)


def split_factor(a: Float[Tensor, "r i"], narrow: torch.dtype) -> tuple[Float[Tensor, "r i"], Float[Tensor, "r i"]]:
    """Two narrow tensors that add up to a wide one, up to the square of the narrow precision."""
    coarse = a.to(narrow)
    return coarse, (a - coarse.to(a.dtype)).to(narrow)


def _reduced(x: Tensor, a: Tensor) -> Tensor:
    """``x a^T`` without widening a narrow ``x``: the factor is split into two narrow parts that add up to it."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return x.to(a.dtype) @ a.T
    both = x @ torch.cat(split_factor(a, x.dtype)).T
    return both[:, : len(a)].to(a.dtype) + both[:, len(a) :]


class _AddLowRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:  # noqa: ANN401 - autograd's own
        result, x, a, b, ctx.scaling = args
        reduced = _reduced(x.flatten(0, -2), a).mul_(ctx.scaling)
        ctx.save_for_backward(x, a, b, reduced)
        narrow = result.dtype
        return torch.addmm(result.flatten(0, -2), reduced.to(narrow), b.T.to(narrow)).view(result.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        x, a, b, reduced = ctx.saved_tensors
        grad, (_, for_x, for_a, for_b, _) = grads[0].flatten(0, -2), ctx.needs_input_grad
        by_reduced = (grad @ b.to(grad.dtype)).to(a.dtype).mul_(ctx.scaling)
        by_x = (by_reduced.to(x.dtype) @ a.to(x.dtype)).view(x.shape) if for_x else None
        by_a = by_reduced.T @ x.flatten(0, -2).to(a.dtype) if for_a else None
        by_b = grad.to(b.dtype).T @ reduced.to(b.dtype) if for_b else None
        return grads[0], by_x, by_a, by_b, None
