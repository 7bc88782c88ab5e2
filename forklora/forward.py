"""Gives the hidden states that predict a completion, each prompt run once for all completions that share it.

Decisions: the prompts go through the model once with a cache, and the completions continue from it; gradients flow
through it. On a CPU the cache is shared by the rows of a group, elsewhere it is repeated by row index. Where a model or
setting has no such cache (recurrent states, gradient checkpointing, weights in pieces under ZeRO-3), prompt and
completion go through together, row by row, with the same result, and this is said once.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from forklora.attention import CannotShare
from forklora.gathering import fetched, partitioned
from forklora.passes import same_prompt
from forklora.unembed import hidden_only, unwrap

_OWN_WAY: WeakSet[nn.Module] = WeakSet()  # models whose attention refused to share
_CACHES = ("past_key_values", "cache", "cache_params")


@dataclass(frozen=True)
class Calls:
    """How one model wants to be called: names of its arguments, and what its cache can do.

    Attributes:
        cache_name: the argument that takes the cache.
        positions: the model takes ``position_ids``.
        shares_prompt: a prompt's cache can serve all rows of its group.
        shares_memory: they need not have copies of it.
        recurrent: no layer keeps keys and values.
    """

    cache_name: str
    positions: bool
    shares_prompt: bool
    shares_memory: bool
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
        # a layer that keeps a state instead of keys and values has no rows to select
        rows = [hasattr(layer, "batch_select_indices") for layer in _growing(model).layers]
        hurdles = {
            "gradient checkpointing is on": base.training and getattr(base, "is_activation_checkpointing", False),
            # every rank must call the model equally often, which depends on lengths if prompts are shared
            "its weights are partitioned (ZeRO-3)": fetched(base) or any(map(partitioned, base.parameters())),
            "it keeps states that cannot be repeated": getattr(base, "_is_stateful", False) or not all(rows),
            "it is an encoder-decoder": base.config.is_encoder_decoder,
        }
        found = [why for why, there in hurdles.items() if there]
        if found:
            _say(f"{type(base).__name__} runs prompts once per row instead of once per group: {', '.join(found)}.")
        memory = not found and base not in _OWN_WAY and _can_share(model)
        return cls(cache_name, "position_ids" in names, not found, memory, bool(rows) and not any(rows))

    @contextlib.contextmanager
    def attending(self, model: nn.Module) -> Iterator[None]:
        """Within the block the model's attention understands the cache of :meth:`cache`.

        Raises:
            CannotShare: it does not after all; the next :meth:`of` knows.
        """
        if not self.shares_memory:
            yield
            return
        from forklora.cache import sharing

        try:
            with sharing(model):
                yield
        except CannotShare as refusal:
            _OWN_WAY.add(unwrap(model))
            _say(f"prompts are copied for their groups: {refusal}")
            raise

    def cache(self, model: nn.Module) -> Any:  # noqa: ANN401 - transformers' cache
        """An empty cache; importing transformers only here keeps the package light."""
        if not self.shares_memory:
            return _growing(model)
        from forklora.cache import shared_cache

        return shared_cache(model)

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


def _growing(model: nn.Module) -> Any:  # noqa: ANN401
    from transformers import DynamicCache

    return DynamicCache(config=unwrap(model).config)


def _can_share(model: nn.Module) -> bool:
    from forklora.cache import can_share

    return can_share(model)


def _say(what: str) -> None:
    """Once: Python's default filter shows a warning of one text and place a single time."""
    warnings.warn(what, stacklevel=2)


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
    ids, mask = torch.cat([prompt_ids, completion_ids], 1), torch.cat([prompt_mask, completion_mask], 1)
    rows, calls = {"ids": ids, "mask": mask, "width": prompt_ids.shape[1]}, Calls.of(model)
    if not calls.shares_prompt:
        return _row_by_row(model, calls, **rows)
    try:
        with calls.attending(model):
            return _group_by_group(model, calls, **rows)
    except CannotShare:
        return _group_by_group(model, Calls.of(model), **rows)


def _row_by_row(model: nn.Module, calls: Calls, *, ids: Tensor, mask: Tensor, width: int) -> Tensor:
    with hidden_only(model) as caught:
        model(input_ids=ids, **calls.arguments(mask, length=ids.shape[1], cache=None))
    return caught[0][:, width - 1 : -1]


def _group_by_group(model: nn.Module, calls: Calls, *, ids: Tensor, mask: Tensor, width: int) -> Tensor:
    steps = ids.shape[1] - width
    first, group = _groups(ids[:, :width], mask[:, :width])
    cache = calls.cache(model)
    with hidden_only(model) as caught:
        model(input_ids=ids[first, :width], **calls.arguments(mask[first, :width], length=width, cache=cache))
        start = caught[0][:, -1:][group]
        if steps == 1:
            return start
        cache.batch_select_indices(group)
        model(input_ids=ids[:, width:-1], **calls.arguments(mask[:, :-1], length=steps - 1, cache=cache))
    return torch.cat([start, caught[1]], 1)


def _groups(
    prompt_ids: Int[Tensor, "n p"], prompt_mask: Bool[Tensor, "n p"]
) -> tuple[Int[Tensor, " g"], Int[Tensor, " n"]]:
    """First row of each group, and each row's group; groups are numbered as they appear."""
    group = same_prompt(prompt_ids, prompt_mask)
    rows = torch.arange(len(group), device=group.device)
    first = torch.full((int(group.max()) + 1,), len(group), device=group.device).scatter_reduce(0, group, rows, "amin")
    order = first.argsort()
    return first[order], order.argsort()[group]
