"""Makes weights that DeepSpeed ZeRO-3 keeps in pieces whole for reading, and says whether they are in pieces now.

Decisions: "partitioned" is a statement about this moment, not about a parameter's history: inside :func:`whole` a model
is like any other. Nothing here loads DeepSpeed unless one of its parameters is there.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

_HOOKS = "deepspeed.runtime.zero.parameter_offload"
_INIT = "deepspeed.runtime.zero.partition_parameters"


def partitioned(parameter: Tensor | None) -> bool:
    """Whether ZeRO-3 holds this parameter in pieces now, so that its own data is empty."""
    status = getattr(parameter, "ds_status", None)
    return status is not None and status.name != "AVAILABLE"


def fetched(model: nn.Module) -> bool:
    """Whether ZeRO-3's hooks fetch this model's weights as it is called: then every rank must call it equally often."""
    return any(getattr(hook, "__module__", "") == _HOOKS for hook in model._forward_pre_hooks.values())


@contextlib.contextmanager
def whole(*parameters: Tensor | None, write: bool = False) -> Iterator[None]:
    """Within the block, parameters in pieces are whole; others are left alone. Every rank must enter it.

    Args:
        parameters: of any kind, None included.
        write: what rank 0 has written into them counts on all ranks afterwards; without it they are for reading only.
    """
    parted = [p for p in parameters if partitioned(p)]
    if not parted:
        yield
        return
    from deepspeed import zero

    with zero.GatheredParameters(parted, modifier_rank=0 if write else None):
        yield


@contextlib.contextmanager
def callable_alone(model: nn.Module) -> Iterator[None]:
    """Within the block the model can be called: all of it is whole, unless hooks fetch each layer when its turn comes.

    This holds the whole model on every rank, as generation does by TRL's default (``ds3_gather_for_generation``).
    """
    with whole(*([] if fetched(model) else model.parameters())):
        yield


def announce(module: nn.Module, *slots: nn.Module) -> None:
    """Tell ZeRO-3 that ``module`` reads the parameters of ``slots`` without calling them, and fetch them now.

    Its hooks fetch what a module owns itself, before its forward and again before its backward pass; of what it reads
    elsewhere they have to be told. Outside of a DeepSpeed engine there is nothing to do.
    """
    known: dict[int, Tensor] | None = module.__dict__.get("_external_params")
    if known is None:
        return
    for parameter in (p for slot in slots for p in slot.parameters(recurse=False)):
        own: Any = parameter
        if hasattr(own, "ds_id"):
            known.setdefault(id(own), own)
            if partitioned(own):
                own.all_gather()


@contextlib.contextmanager
def kept_whole() -> Iterator[None]:
    """Within the block new modules are ordinary ones, also where the caller stands in ``deepspeed.zero.Init``.

    An adapter must be filled before it is partitioned; the engine partitions it when it is made.
    """
    zero = sys.modules.get(_INIT)
    if zero is None:
        yield
        return
    zero.shutdown_init_context()
    try:
        yield
    finally:
        zero.restore_init_context()
