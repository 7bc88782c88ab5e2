"""Gives the hidden states that predict a completion, each prompt run once for all completions that share it.

Decisions: the prompts go through the model once with a cache, the cache is repeated by row index, and the completions
continue from it; gradients flow through the repeated cache. Where a model or setting has no such cache (recurrent
states, gradient checkpointing, weights partitioned by ZeRO-3), prompt and completion go through together, row by row,
with the same result.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from forklora.unembed import hidden_only, unwrap

_CACHES = ("past_key_values", "cache", "cache_params")


@dataclass(frozen=True)
class Calls:
    """How one model wants to be called: names of its arguments, and what its cache can do.

    Attributes:
        cache_name: the argument that takes the cache.
        positions: the model takes ``position_ids``.
        shares_prompt: a prompt's cache can be repeated by row index.
        recurrent: no layer keeps keys and values.
    """

    cache_name: str
    positions: bool
    shares_prompt: bool
    recurrent: bool

    @classmethod
    def of(cls, model: nn.Module) -> Calls:
        """Read the forward signature and the configuration of a (wrapped) causal language model.

        Raises:
            ValueError: the model's forward takes no cache, so that it cannot continue a prompt.
        """
        base = unwrap(model)
        names = inspect.signature(base.forward).parameters
        cache_name = next((name for name in _CACHES if name in names), None)
        if cache_name is None:
            raise ValueError(f"{type(base).__name__}.forward takes none of {', '.join(_CACHES)}: it has no cache.")
        checkpointing = bool(getattr(base, "is_activation_checkpointing", False)) and base.training
        # under ZeRO-3 every rank must call the model equally often, which depends on lengths if prompts are shared
        whole = not any(hasattr(p, "ds_id") for p in base.parameters())
        plain = whole and not getattr(base, "_is_stateful", False) and not base.config.is_encoder_decoder
        # a layer that keeps a state instead of keys and values has no rows to select
        rows = [hasattr(layer, "batch_select_indices") for layer in new_cache(model).layers]
        shares = plain and not checkpointing and all(rows)
        return cls(cache_name, "position_ids" in names, shares, bool(rows) and not any(rows))

    def arguments(self, mask: Bool[Tensor, "n l"], *, length: int, cache: Any) -> dict[str, Any]:  # noqa: ANN401
        """Keyword arguments of one call on the last ``length`` columns of ``mask``."""
        # a purely recurrent model multiplies what it is fed by its mask: it must not see the columns before
        seen = mask[:, -length:] if self.recurrent else mask
        found: dict[str, Any] = {"attention_mask": seen.long(), "use_cache": cache is not None}
        if self.positions:
            found["position_ids"] = (mask.long().cumsum(-1) - 1).clamp_min(0)[:, -length:]
        if cache is not None:
            found[self.cache_name] = cache
        return found


def new_cache(model: nn.Module) -> Any:  # noqa: ANN401 - transformers' cache
    """An empty growing cache for this model; importing transformers only here keeps the package light."""
    from transformers import DynamicCache

    return DynamicCache(config=unwrap(model).config)


def completion_hidden(
    model: nn.Module,
    prompt_ids: Int[Tensor, "n p"],
    *,
    prompt_mask: Bool[Tensor, "n p"],
    completion_ids: Int[Tensor, "n t"],
    completion_mask: Bool[Tensor, "n t"],
) -> Float[Tensor, "n t d"]:
    """Hidden states ``h_t`` that predict each completion token: ``[n, t, d]``, with gradient where it is enabled.

    Rows may come in any order; equal prompts are found and run once. Values at padded positions are not defined.

    Args:
        model: the (wrapped) causal language model.
        prompt_ids: left-padded prompts.
        prompt_mask: true at the prompt's own tokens.
        completion_ids: right-padded completions.
        completion_mask: true at the completion's own tokens.
    """
    calls, steps = Calls.of(model), completion_ids.shape[1]
    mask = torch.cat([prompt_mask, completion_mask], 1)
    if not calls.shares_prompt:
        ids = torch.cat([prompt_ids, completion_ids], 1)
        with hidden_only(model) as caught:
            model(input_ids=ids, **calls.arguments(mask, length=ids.shape[1], cache=None))
        return caught[0][:, prompt_ids.shape[1] - 1 : -1]
    keyed = torch.where(prompt_mask, prompt_ids, -1)
    _, group = torch.unique(keyed, dim=0, return_inverse=True)
    first = torch.full((int(group.max()) + 1,), len(group), device=group.device)
    first = first.scatter_reduce(0, group, torch.arange(len(group), device=group.device), "amin")
    cache = new_cache(model)
    with hidden_only(model) as caught:
        model(
            input_ids=prompt_ids[first], **calls.arguments(prompt_mask[first], length=prompt_ids.shape[1], cache=cache)
        )
        start = caught[0][:, -1:][group]
        if steps == 1:
            return start
        cache.batch_select_indices(group)
        model(input_ids=completion_ids[:, :-1], **calls.arguments(mask[:, :-1], length=steps - 1, cache=cache))
    return torch.cat([start, caught[1]], 1)
