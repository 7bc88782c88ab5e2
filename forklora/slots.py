"""Puts bases into the frozen factors of an adapter that stands on a model already, or renews them as it is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from forklora.adapter import ForkLinear, ForkLoraConfig, ForkVariant, first_core, starts
from forklora.gathering import whole
from forklora.spanned import SpannedLinear


def put_bases(model: nn.Module, bases: Mapping[str, Any], *, adapter_name: str = "default") -> None:
    """Put bases into the frozen factors of a fork adapter, in place of those that it was made with.

    What an adapter has learned is stated in its bases: where training resumes, those of the checkpoint go in before the
    checkpoint's adapter is loaded. Trained numbers are left alone, and so is a basis that is trained itself. Under
    ZeRO-3 every rank must call this, with the same bases.

    Args:
        model: the model with the adapter.
        bases: layer name to bases, as for ``ForkLoraConfig``.
        adapter_name: PEFT's name of the adapter.

    Raises:
        ValueError: no such fork adapter, a merged one, a layer without a basis, or a basis that does not fit. Nothing
            is changed then.
    """
    config = _config(model, adapter_name)
    places = _places(model, replace(config, bases=bases), adapter_name)
    if config.train_basis:
        return
    with whole(*(place for place, _ in places), write=True), torch.no_grad():
        for place, value in places:
            place.copy_(value)


Put = Callable[[Tensor, Tensor], None]


def _copied(place: Tensor, value: Tensor) -> None:
    place.copy_(value)


@torch.no_grad()
def renew_bases(
    model: nn.Module, bases: Mapping[str, Any], *, adapter_name: str = "default", put: Put = _copied
) -> None:
    """Exchange the bases of a fork adapter and keep what it has learned: the model computes what it did before.

    The update ``s B A`` that was learned stays as frozen factors beside the adapter's own, and the trained numbers are
    again those of a fresh adapter on the new bases. So after ``n`` calls the adapter is, and is saved as, an ordinary
    LoRA of ``n + 1`` times the rank. Optimizer states belong to the old bases, and are the caller's to drop.

    Args:
        model: the model with the adapter.
        bases: layer name to bases, as for ``ForkLoraConfig``.
        adapter_name: PEFT's name of the adapter.
        put: sets a trained parameter to a value; an engine that holds copies of them needs its own.

    Raises:
        ValueError: no such fork adapter, a merged one, one whose basis is trained or that ZeRO-3 holds in pieces, a
            layer without a basis, or a basis that does not fit. Nothing is changed then.
    """
    config = renewable(model, adapter_name=adapter_name)
    places, slots = _places(model, replace(config, bases=bases), adapter_name), _slots(model, adapter_name)
    for slot in slots:
        slot.keep(slot.stated())
    frozen = {id(place) for place, _ in places}
    for place, value in places:
        place.copy_(value)
    for slot in slots:
        start = first_core(config.kind, slot.core.shape) if isinstance(slot, SpannedLinear) else None
        for parameter in slot.parameters():
            if id(parameter) not in frozen:
                put(parameter, torch.zeros_like(parameter) if start is None else start.to(parameter))
    config.folds += 1


def renewable(model: nn.Module, *, adapter_name: str = "default") -> ForkLoraConfig:
    """The adapter's configuration, if its bases can be renewed.

    Raises:
        ValueError: no such fork adapter, or one whose basis is trained or that ZeRO-3 holds in pieces.
    """
    config = _config(model, adapter_name)
    if config.train_basis:
        raise ValueError("train_basis=True: the basis follows by training, and there is nothing to renew.")
    if any(hasattr(p, "ds_id") for slot in _slots(model, adapter_name) for p in slot.parameters()):
        raise ValueError("ZeRO-3 holds the adapter in pieces: renew bases under ZeRO-2 or lower.")
    return config


def folded(model: nn.Module, *, adapter_name: str = "default") -> int:
    """How often the bases of the adapter were renewed; 0 as well for anything that is no fork adapter."""
    config = getattr(model, "peft_config", {}).get(adapter_name)
    return config.folds if isinstance(config, ForkLoraConfig) else 0


def make_room(model: nn.Module, folds: int, *, adapter_name: str = "default") -> None:
    """Let a fresh adapter take in one whose bases were renewed ``folds`` times; until then it computes what it did.

    Raises:
        ValueError: no such fork adapter.
    """
    if folds == folded(model, adapter_name=adapter_name):
        return
    config = _config(model, adapter_name)
    for slot in _slots(model, adapter_name):
        weight = slot.weight.detach()
        slot.keep(torch.cat([torch.zeros_like(weight)] * folds, slot.rank_side) if folds else None)
    config.folds = folds


def _config(model: nn.Module, adapter_name: str) -> ForkLoraConfig:
    there = getattr(model, "peft_config", {})
    config = there.get(adapter_name)
    if not isinstance(config, ForkLoraConfig):
        raise ValueError(f"{adapter_name!r} is no fork adapter of the model; there are {', '.join(there) or 'none'}.")
    return config


def _slots(model: nn.Module, adapter_name: str) -> list[Any]:
    layers = [layer for _, layer in _layers(model, adapter_name)]
    return [slot for layer in layers for slot in (layer.lora_A[adapter_name], layer.lora_B[adapter_name])]


def _layers(model: Any, adapter_name: str) -> list[tuple[str, Any]]:  # noqa: ANN401 - a PeftModel
    named = model.get_base_model().named_modules()
    ours = [(name, module) for name, module in named if isinstance(module, ForkLinear)]
    return [(name, m) for name, m in ours if isinstance(m.lora_variant.get(adapter_name), ForkVariant)]


def _places(model: nn.Module, config: ForkLoraConfig, adapter_name: str) -> list[tuple[Tensor, Tensor]]:
    """Where the config's bases go, with their values; or why they cannot."""
    found = []
    for name, module in _layers(model, adapter_name):
        if module.merged:
            raise ValueError(f"{name} is merged with its adapter: unmerge it before its bases are changed.")
        for slot, value in starts(module, config, layer=name).items():
            place = getattr(module, slot)[adapter_name]
            found.append((place.basis if isinstance(place, SpannedLinear) else place.weight, value))
    return found
