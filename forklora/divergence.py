"""Gives how far two policies lie apart at the same positions, exactly over the vocabulary.

Decisions: hidden states go in, and logits exist for a few positions at a time, so that memory does not grow with the
number of positions times the vocabulary.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from forklora.gathering import whole
from forklora.unembed import Unembedding

_TOGETHER = 2**24  # logits at a time


@torch.no_grad()
def divergences(
    hidden: tuple[Float[Tensor, "n d"], Float[Tensor, "n e"]],
    heads: tuple[Unembedding, Unembedding],
    *,
    temperature: float = 1.0,
) -> Float[Tensor, " n"]:
    """``KL(p || q) = sum_a p(a) (log p(a) - log q(a))`` at each position, nats, float32.

    Args:
        hidden: last hidden states ``[n, d]`` of the two policies, after the final norm.
        heads: their output heads, of one vocabulary.
        temperature: divides the logits of both.

    Every rank has to call this as often as every other where the weights are in pieces (ZeRO-3).
    """
    size = max(_TOGETHER // heads[0].vocabulary, 1)
    weights = [w for head in heads for w in (head.weight, getattr(head.head, "bias", None))]
    found = []
    with whole(*weights):
        for parts in zip(*(h.split(size) for h in hidden), strict=True):
            p, q = ((head.logits(part) / temperature).log_softmax(-1) for head, part in zip(heads, parts, strict=True))
            found.append((p.exp() * (p - q)).sum(-1))
    return torch.cat(found)
