"""A cache that holds each prompt once for its group, and the completions behind it in memory that grows by doubling.

Decisions: it is transformers' own growing cache with other layers, so every model that updates its cache and passes the
keys on to its attention can use it; the attention finds the prompts by a mark on those keys.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from forklora.attention import Layout, Prompts, shared_attention
from forklora.unembed import output_head, unwrap

_NAME = "forklora_shared"
_FIRST = 32  # positions that memory is first taken for


class SharedLayer(DynamicLayer):
    """Keys and values of one layer: of the prompts alone at first, then of the completions that continue them."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: Prompts | None = None
        self.group: Tensor | None = None
        self.own: tuple[Tensor, Tensor] | None = None  # the rows' keys and values, with room to grow
        self.length = 0

    def batch_select_indices(self, indices: Int[Tensor, " n"]) -> None:
        """Row ``i`` becomes a copy of row ``indices[i]``; what rows have in common is not copied."""
        if self.keys is None or self.values is None:
            raise RuntimeError("rows of an empty cache: run the prompts first.")
        self.group = indices if self.group is None else self.group[indices]
        self.own = self.own and (self.own[0][indices], self.own[1][indices])
        self.prompts = Prompts(self.keys, self.values, Layout.of(self.group, len(self.keys)))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add new positions; returns all of the rows' own, the keys marked with their prompts."""
        if self.prompts is None:
            return super().update(key_states, value_states, *args, **kwargs)
        start, self.length = self.length, self.length + key_states.shape[-2]
        if self.own is None:
            keys, values = key_states, value_states
        else:
            keys, values = (
                _grown(h, n, start=start) for h, n in zip(self.own, (key_states, value_states), strict=True)
            )
        self.own = keys, values
        return self.prompts.mark(keys[:, :, : self.length]), values[:, :, : self.length]

    def get_seq_length(self) -> int:
        """Positions seen so far, the prompt's included."""
        return super().get_seq_length() if self.prompts is None else self.prompts.keys.shape[2] + self.length


def _grown(held: Tensor, new: Tensor, *, start: int) -> Tensor:
    """Memory with the new positions written behind the first ``start``; a new tensor where gradients are wanted."""
    if new.requires_grad:
        return torch.cat([held[:, :, :start], new], -2)
    end = start + new.shape[-2]
    if end > held.shape[-2]:
        room = held.new_zeros(*held.shape[:2], max(_FIRST, 2 * end), held.shape[-1])
        room[:, :, :start] = held[:, :, :start]
        held = room
    held[:, :, start:end] = new
    return held


def can_share(model: nn.Module) -> bool:
    """Whether the model's layers all keep plain keys and values, and run on a CPU through the fused kernel.

    On an accelerator the fused kernels are faster than products by blocks.
    """
    base = unwrap(model)
    on_cpu = all(end.weight.device.type == "cpu" for end in (base.get_input_embeddings(), output_head(base)))
    plain = all(type(layer) is DynamicLayer for layer in DynamicCache(config=base.config).layers)
    return on_cpu and plain and base.config.get_text_config()._attn_implementation == "sdpa"


def shared_cache(model: nn.Module) -> DynamicCache:
    """An empty cache of this model whose ``batch_select_indices`` shares instead of copying."""
    cache = DynamicCache(config=unwrap(model).config)
    cache.layers[:] = [SharedLayer() for _ in cache.layers]
    return cache


@contextlib.contextmanager
def sharing(model: nn.Module) -> Iterator[None]:
    """Within the block the model attends through :func:`forklora.attention.shared_attention`."""
    base = unwrap(model)
    AttentionInterface.register(_NAME, shared_attention)
    AttentionMaskInterface.register(_NAME, _mask)
    before = base.config.get_text_config()._attn_implementation
    base.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        base.set_attn_implementation(before)


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:  # noqa: ANN401
    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
