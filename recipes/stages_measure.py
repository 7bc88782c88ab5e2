"""What a cell's saved adapter says: how much of its update lies outside the bases, how far it is from another's.

    outside    |dW - P dW Q| / |dW|, the worst layer; P and Q project on the bases of the kind's sides, else do nothing
    distance   |dW - dW'| / |dW'|, all layers together

Everything is found in float64 from the ordinary LoRA that was exported.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from forklora.adapter import ForkLoraConfig

_PREFIX = "base_model.model."


def saved_update(folder: Path) -> dict[str, Tensor]:
    """``dW = s B A`` of every layer from the ordinary LoRA in a folder, float64, by the base's name of the layer."""
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    tensors = {name: t.double() for name, t in load_file(folder / "adapter_model.safetensors").items()}
    layers = [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]
    scale = config["lora_alpha"] / config["r"]
    return {
        layer.removeprefix(_PREFIX): scale * tensors[f"{layer}.lora_B.weight"] @ tensors[f"{layer}.lora_A.weight"]
        for layer in layers
    }


def share_outside(delta: Tensor, *, output: Tensor | None = None, input: Tensor | None = None) -> float | None:  # noqa: A002
    """``|dW - U U^T dW Q Q^T| / |dW|`` for ``U [d_out, k]``, ``Q [d_in, m]``; None where there is no update."""
    delta = delta.double()
    inside = delta
    if output is not None:
        u = torch.linalg.qr(output.double()).Q
        inside = u @ (u.T @ inside)
    if input is not None:
        q = torch.linalg.qr(input.double()).Q
        inside = (inside @ q) @ q.T
    size = float(delta.norm())
    return float((delta - inside).norm()) / size if size > 0 else None


def worst_outside(update: Mapping[str, Tensor], bases: Mapping[str, Any], *, config: ForkLoraConfig) -> float | None:
    """The largest share outside over all layers that moved, under the sides and widths of the adapter's kind."""
    k, m = config.output_width, config.input_width
    shares = [
        share_outside(
            delta,
            output=bases[layer].output[:, :k] if k else None,
            input=bases[layer].input[:, :m] if m else None,
        )
        for layer, delta in update.items()
    ]
    return max((share for share in shares if share is not None), default=None)


def distance(update: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float | None:
    """How far the update is from another one relative to its size; None where layers differ or it is nothing."""
    size = sum(float(delta.norm()) ** 2 for delta in other.values()) ** 0.5
    if update.keys() != other.keys() or size == 0:
        return None
    return sum(float((update[layer] - delta).norm()) ** 2 for layer, delta in other.items()) ** 0.5 / size


def largest_gap(curve: Sequence[float], other: Sequence[float]) -> float | None:
    """The largest difference between two reward curves; None where they have different lengths, or none."""
    if len(curve) != len(other) or not curve:
        return None
    return max(abs(a - b) for a, b in zip(curve, other, strict=True))
