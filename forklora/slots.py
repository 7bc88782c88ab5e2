"""Puts bases into the frozen factors of an adapter that stands on a model already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from forklora.adapter import ForkLinear, ForkLoraConfig, ForkVariant, starts
from forklora.gathering import whole
from forklora.spanned import SpannedLinear


def put_bases(model: PeftModel, bases: Mapping[str, Any], *, adapter_name: str = "default") -> None:
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
    config = model.peft_config.get(adapter_name)
    if not isinstance(config, ForkLoraConfig):
        raise ValueError(f"{adapter_name!r} is no fork adapter of the model; there are {', '.join(model.peft_config)}.")
    chosen = replace(config, bases=bases)
    places: list[Tensor] = []
    values: list[Tensor] = []
    for name, module in model.get_base_model().named_modules():
        variant = module.lora_variant.get(adapter_name) if isinstance(module, ForkLinear) else None
        if not isinstance(variant, ForkVariant):
            continue
        if module.merged:
            raise ValueError(f"{name} is merged with its adapter: unmerge it before its bases are changed.")
        for slot, value in starts(module, chosen, layer=name).items():
            place = getattr(module, slot)[adapter_name]
            places.append(place.basis if isinstance(place, SpannedLinear) else place.weight)
            values.append(value)
    if config.train_basis:
        return
    with whole(*places, write=True), torch.no_grad():
        for place, value in zip(places, values, strict=True):
            place.copy_(value)
