"""Reads and puts back all tensors of an adapter to the bit, frozen bases included.

Decisions: an ordinary LoRA holds products such as ``U C``, from which the factors come back only up to rounding. To
resume exactly the factors themselves are needed; these are they, under the names they have in the model.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from forklora.gathering import whole


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all LoRA tensors of a model by name, buffers included; under ZeRO-3 every rank must call this."""
    own = _own(model)
    with whole(*own.values()):
        return {name: tensor.detach().cpu().clone() for name, tensor in own.items()}


@torch.no_grad()
def put_adapter_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Set what :func:`adapter_tensors` read; under ZeRO-3 every rank must call this, with the same tensors.

    Raises:
        ValueError: other names or shapes than the model's adapter has; nothing is changed.
    """
    own = _own(model)
    shapes = {name: tuple(getattr(tensor, "ds_shape", tensor.shape)) for name, tensor in own.items()}
    given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = sorted(name for name in {**shapes, **given} if shapes.get(name) != given.get(name))
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"the checkpoint's adapter is another one: {len(wrong)} tensors differ in name or shape ({name} is "
            f"{given.get(name, 'missing')} there and {shapes.get(name, 'missing')} in the model). Use the kind, rank "
            "and target modules it was trained with."
        )
    with whole(*own.values(), write=True):
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def _own(model: nn.Module) -> dict[str, Tensor]:
    every = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor for name, tensor in every if ".lora_" in name}
