"""Tells which layers of a model a configuration adapts, and what becomes of each of the others.

Decisions: PEFT's own private functions are asked, so that the answer cannot differ from what PEFT does later; a pattern
that matches nothing raises here, because a typing error in it would otherwise train something else without a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import (
    BaseTunerLayer,
    _ExcludedModule,
    _get_in_out_features,
    _maybe_include_all_linear_layers,
    check_target_module_exists,
)
from peft.utils.constants import EMBEDDING_LAYER_NAMES
from torch import nn
from transformers.pytorch_utils import Conv1D

HEADS = (*EMBEDDING_LAYER_NAMES, "embed_out")


@dataclass(frozen=True)
class Fate:
    """What becomes of one linear layer.

    Attributes:
        layer: its name in the bare model.
        shape: ``(d_out, d_in)``.
        output: directions of its output basis that the adapter starts from; 0 where the kind uses none.
        input: directions of its input basis.
        skipped: why it is left alone; empty where it is adapted.
    """

    layer: str
    shape: tuple[int, int]
    output: int = 0
    input: int = 0
    skipped: str = ""


def target_layers(model: nn.Module, config: LoraConfig) -> list[str]:
    """Names of the linear layers that PEFT will adapt under this configuration, before anything is built.

    Raises:
        ValueError: nothing matches, a pattern matches nothing, or the embeddings, the head or something else than a
            linear layer is targeted.
    """
    base, chosen = _expanded(model, config)
    found = []
    for name, module in _modules(base):
        if not check_target_module_exists(chosen, name):
            continue
        refuse_head(name, module in _ends(base))
        if not isinstance(inner(module), nn.Linear | Conv1D):
            refuse_layer(module, target_name=name)
        found.append(name)
    if not found:
        raise ValueError(f"target_modules={config.target_modules!r} matches no linear layer of {type(model).__name__}.")
    _refuse_idle_modules(config, [name for name, _ in _modules(base)])
    refuse_idle_patterns(config, found)
    indices = chosen.layers_to_transform
    for index in [indices] if isinstance(indices, int) else indices or ():
        one = replace(chosen, layers_to_transform=[index])
        if not any(check_target_module_exists(one, name) for name in found):
            raise ValueError(f"layers_to_transform={indices!r}: no target layer has the index {index}.")
    return found


def layer_fates(model: nn.Module, config: Any) -> list[Fate]:  # noqa: ANN401 - a ForkLoraConfig
    """What a ``ForkLoraConfig`` makes of every linear layer of a model, in the model's order.

    Raises:
        ValueError: as :func:`target_layers`.
    """
    adapted = set(target_layers(model, config))
    base, chosen = _expanded(model, config)
    fates = []
    for name, module in _modules(base):
        if not isinstance(inner(module), nn.Linear | Conv1D):
            continue
        d_in, d_out = _get_in_out_features(inner(module))
        shape = (d_out or 0, d_in or 0)
        if name in adapted:
            fates.append(Fate(name, shape, *config.directions(name)))
        else:
            fates.append(Fate(name, shape, skipped=_reason(base, chosen, name, module)))
    return fates


def fate_table(fates: Iterable[Fate]) -> str:
    """The fates as text, one line a layer: name, shape, bases, or why it is skipped."""
    rows = [
        (
            fate.layer,
            f"{fate.shape[0]} x {fate.shape[1]}",
            f"skipped: {fate.skipped}" if fate.skipped else f"output basis {fate.output}, input basis {fate.input}",
        )
        for fate in fates
    ]
    name, shape = (max((len(row[i]) for row in rows), default=0) for i in (0, 1))
    return "\n".join(f"{layer:<{name}}  {size:>{shape}}  {what}" for layer, size, what in rows)


def refuse_idle_patterns(config: LoraConfig, layers: Iterable[str]) -> None:
    """Refuse a key of ``rank_pattern`` or ``alpha_pattern`` that is the name of none of these layers."""
    names = list(layers)
    for field in ("rank_pattern", "alpha_pattern"):
        for key in getattr(config, field) or ():
            if not any(re.match(rf"(.*\.)?({key})$", name) for name in names):
                raise ValueError(f"{field}: {key!r} matches none of {len(names)} layers ({', '.join(names[:2])}, ..).")


def refuse_head(name: str, is_head: bool) -> None:
    """Refuse the embedding or the unembedding as a target."""
    if is_head:
        raise ValueError(
            f"{name} is the embedding or the unembedding: the bases are read off its rows and would go stale once it "
            "is adapted. Leave it out of target_modules."
        )


def refuse_layer(target: nn.Module, *_: Any, **kwargs: Any) -> nn.Module:  # noqa: ANN401
    """Stands in PEFT's table for all types of layers that have no fork adapter."""
    name, type_ = kwargs["target_name"], type(inner(target)).__name__
    refuse_head(name, isinstance(inner(target), nn.Embedding))
    raise ValueError(f"{name} is a {type_}: fork adapters are for linear layers; leave it out of target_modules.")


def inner(module: nn.Module) -> nn.Module:
    """The layer of the bare model that PEFT has wrapped, or the module itself."""
    return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module


def _expanded(model: nn.Module, config: LoraConfig) -> tuple[Any, LoraConfig]:
    """The bare model, and the configuration with its target modules by name."""
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    chosen: Any = _maybe_include_all_linear_layers(replace(config), base)
    return base, chosen


def _modules(base: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of the bare model, without what PEFT has put into it."""
    return ((n, m) for n, m in base.named_modules() if ".base_layer" not in n and ".lora_" not in n)


def _ends(base: Any) -> tuple[nn.Module, ...]:  # noqa: ANN401
    return (base.get_input_embeddings(), base.get_output_embeddings()) if hasattr(base, "get_input_embeddings") else ()


def _reason(base: nn.Module, config: LoraConfig, name: str, module: nn.Module) -> str:
    if module in _ends(base):
        return "the unembedding, off whose rows the bases are read"
    if isinstance(check_target_module_exists(config, name), _ExcludedModule):
        return "named in exclude_modules"
    if check_target_module_exists(replace(config, layers_to_transform=None, layers_pattern=None), name):
        return "not in layers_to_transform"
    return "not in target_modules"


def _refuse_idle_modules(config: LoraConfig, names: list[str]) -> None:
    for field in ("target_modules", "exclude_modules"):
        given = getattr(config, field)
        for pattern in [] if isinstance(given, str) else given or ():
            if not any(f".{name}".endswith(f".{pattern}") for name in names):
                raise ValueError(f"{field}: {pattern!r} is the name of no module of the model; it would do nothing.")
    rule = config.exclude_modules
    if isinstance(rule, str) and not any(re.fullmatch(rule, name) for name in names):
        raise ValueError(f"exclude_modules={rule!r} matches no module of the model; it would do nothing.")
