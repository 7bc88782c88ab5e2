"""A linear map through a fixed basis that states and reads itself as one plain ``weight``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class SpannedLinear(nn.Module):
    """A bias-free linear map ``x -> U (core x)`` with a fixed ``U``, which states itself as one plain ``weight``.

    Args:
        basis: ``U [d_out, k]``, orthonormal columns.
        core: ``C [k, r]``, the trained numbers.
        train_basis: whether ``U`` is a parameter as well.
    """

    def __init__(self, basis: Tensor, core: Tensor, *, train_basis: bool) -> None:
        super().__init__()
        self.core = nn.Parameter(core)
        if train_basis:
            self.basis = nn.Parameter(basis)
        else:
            self.register_buffer("basis", basis, persistent=False)

    @property
    def weight(self) -> Tensor:
        """``U C [d_out, r]``."""
        return self.basis @ self.core.to(self.basis.dtype)

    @property
    def bias(self) -> None:
        """There is none; PEFT asks."""
        return

    def forward(self, x: Tensor) -> Tensor:
        """``[.., r] -> [.., d_out]``."""
        return nn.functional.linear(nn.functional.linear(x, self.core), self.basis)

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        weight = self.weight
        destination[prefix + "weight"] = weight if keep_vars else weight.detach()

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes them by position
        self, state_dict: dict[str, Tensor], prefix: str, *args: Any
    ) -> None:  # noqa: ANN401
        _, _, missing, _, errors = args
        weight = state_dict.get(prefix + "weight")
        if weight is None:
            missing.append(prefix + "weight")
            return
        expected = (self.basis.shape[0], self.core.shape[1])
        if tuple(weight.shape) != expected:
            errors.append(f"{prefix}weight is {tuple(weight.shape)}, expected {expected}.")
            return
        core, basis = factor(
            weight.to(self.basis.device), self.basis.detach(), free=isinstance(self.basis, nn.Parameter)
        )
        if not (basis @ core - weight.to(basis)).norm() <= 1e-3 * weight.norm():
            errors.append(
                f"{prefix}weight lies outside the span of this layer's basis: load the bases it was trained with."
            )
            return
        with torch.no_grad():
            self.core.copy_(core)
            self.basis.copy_(basis)


def factor(weight: Tensor, basis: Tensor, *, free: bool) -> tuple[Tensor, Tensor]:
    """``C [k, r]`` and ``U [d_out, k]``, float64, with ``U C`` as near to ``weight [d_out, r]`` as they can be.

    ``C`` solves the least squares problem for the given ``U``. A free (trained) basis then takes up the rest by its
    smallest change; how a trained product was split before is not recorded in an ordinary LoRA.
    """
    weight, basis = weight.double(), basis.double()
    core = torch.linalg.lstsq(basis, weight).solution
    if free:
        basis = basis + (weight - basis @ core) @ torch.linalg.pinv(core)
    return core, basis


def leading(basis: Tensor | None, count: int, *, where: str) -> Tensor:
    """The first ``count`` columns of a basis ``[d, k]``, float32, as a copy that may be trained.

    Raises:
        ValueError: there are fewer columns, or they are not orthonormal; the message begins with ``where``.
    """
    have = 0 if basis is None else basis.shape[1]
    if basis is None or have < count:
        raise ValueError(
            f"{where}: {count} directions asked for, the basis has {have}. Ask for a lower rank or width, leave the "
            "layer out (exclude_modules), or collect bases with more directions."
        )
    chosen = basis[:, :count].detach().float().clone()
    error = (chosen.T @ chosen - torch.eye(count, device=chosen.device)).abs().max()
    if not error <= 1e-4:
        raise ValueError(
            f"{where}: the basis {tuple(basis.shape)} is not orthonormal (largest error {error:.2g}): take "
            "torch.linalg.qr(basis).Q."
        )
    return chosen


def sides(
    bases: Mapping[str, Any] | None, *, kind: str, layer: str, shape: tuple[int, int]
) -> tuple[Tensor | None, Tensor | None]:
    """Output and input basis of a layer, with their sizes checked against the layer's ``(d_out, d_in)``.

    Raises:
        ValueError: there is no basis for the layer, or one of another size.
    """
    if bases is None:
        raise ValueError(
            "ForkLoraConfig has no bases. Collect them (forklora.attach(model, config, tokenizer=.., prompts=..)), "
            "load them (Bases.load), pass any mapping of layer names to tensors, or train with ForkGRPOTrainer."
        )
    found = bases.get(layer)
    if found is None:
        near = ", ".join(list(bases)[:3])
        raise ValueError(f"no basis for target layer {layer}; there are bases for {len(bases)} layers ({near}, ..).")
    if isinstance(found, Tensor):
        sides = (None, found) if kind == "inputs" else (found, None)
    elif isinstance(found, tuple | list):
        sides = (found[0], found[1])
    else:
        sides = (found.output, found.input)
    for side, size, name in zip(sides, shape, ("output", "input"), strict=True):
        if side is not None and (side.dim() != 2 or side.shape[0] != size):
            raise ValueError(f"{layer}: {name} basis is {tuple(side.shape)}, the layer needs [{size}, directions].")
    return sides
