"""A linear map through a fixed basis that states and reads itself as one plain ``weight``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from forklora.gathering import partitioned, whole


class Recalled(nn.Module):
    """A slot of an adapter, in the base's precision; cast up to float32 by PEFT, it gets back the digits it had before.

    PEFT makes an adapter in the base's precision and casts it up afterwards, unless it was told not to
    (``autocast_adapter_dtype=False``). A basis that went through bfloat16 would be none any more.

    Attributes:
        kept: frozen factors of earlier bases, which count as further rows or columns of the weight; None before there
            are any.
        rank_side: dimension of the weight that is the rank: 0 of ``A [r, d_in]``, 1 of ``B [d_out, r]``.
    """

    kept: Tensor | None
    rank_side: int = 1
    weight: Any

    def stated(self) -> Tensor:
        """The whole factor: the weight, and behind it what is kept."""
        return self.weight if self.kept is None else torch.cat([self.weight, self.kept.to(self.weight)], self.rank_side)

    def keep(self, factor: Tensor | None) -> None:
        """Make this what is kept, in place of what was."""
        self.kept = None if factor is None else factor.detach().clone()

    def _shares(self, factor: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """The weight's own share of a whole factor, and what is kept; None where it has other sizes than this one."""
        if self.kept is None:
            return factor, None
        own, rest = self.weight.shape[self.rank_side], self.kept.shape[self.rank_side]
        if tuple(factor.shape) != tuple(self.stated().shape):
            return None
        mine, kept = factor.split([own, rest], self.rank_side)
        return mine, kept

    def narrowed(self, dtype: torch.dtype) -> Any:  # noqa: ANN401 - itself
        """Cast the parameters to the base's precision, and keep in mind what that rounds away."""
        exact = {n: p.detach() for n, p in self.named_parameters(recurse=False)}
        for name, parameter in self.named_parameters(recurse=False):
            parameter.data = exact[name].to(dtype)
        rounded = {n: t for n, t in exact.items() if not t.is_meta and not torch.equal(t.to(dtype).to(t), t)}
        object.__setattr__(self, "_exact", rounded)
        return self

    def __setattr__(self, name: str, value: Any) -> None:  # noqa: ANN401
        exact = self.__dict__.get("_exact", {}).pop(name, None)
        if exact is not None and isinstance(value, nn.Parameter) and value.dtype == exact.dtype:
            value.data = exact.to(value.device)
        super().__setattr__(name, value)


class PlainSlot(Recalled, nn.Linear):
    """PEFT's own kind of slot, a bias-free linear layer, with a given weight ``[out, in]``."""

    def __init__(self, weight: Tensor, *, rank_side: int) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = nn.Parameter(weight)
        self.register_buffer("kept", None, persistent=False)
        self.rank_side = rank_side

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name of it
        """``[.., in] -> [.., out]``, what is kept included."""
        return nn.functional.linear(input, self.stated())

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.kept is not None:
            destination[prefix + "weight"] = self.stated() if keep_vars else self.stated().detach()

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes them by position
        self, state_dict: dict[str, Tensor], prefix: str, *args: Any
    ) -> None:
        _, _, _, _, errors = args
        name = prefix + "weight"
        shares = self._shares(state_dict[name]) if name in state_dict else None
        if name in state_dict and shares is None:
            errors.append(f"{name} is {tuple(state_dict[name].shape)}, expected {tuple(self.stated().shape)}.")
            return
        own = {} if shares is None else {name: shares[0]}
        super()._load_from_state_dict({**state_dict, **own}, prefix, *args)
        if shares is not None and shares[1] is not None:
            self.keep(shares[1].to(self.kept))


class SpannedLinear(Recalled):
    """A bias-free linear map ``x -> U (core x)`` with a fixed ``U``, which states itself as one plain ``weight``.

    Its state is the product, with what is kept: that of an ordinary LoRA. The tensor carries its factors as an
    attribute, which ``torch.save`` keeps and safetensors drops: so a checkpoint comes back bit for bit.

    Args:
        basis: ``U [d_out, k]``, orthonormal columns.
        core: ``C [k, r]``, the trained numbers.
        train_basis: whether ``U`` is a parameter as well.
    """

    def __init__(self, basis: Tensor, core: Tensor, *, train_basis: bool) -> None:
        super().__init__()
        self.core = nn.Parameter(core)
        self.register_buffer("kept", None, persistent=False)
        if train_basis:
            self.basis = nn.Parameter(basis)
        else:
            self.register_buffer("basis", basis, persistent=False)

    @property
    def weight(self) -> Tensor:
        """``U C [d_out, r]``."""
        return _product(self.basis, self.core)

    @property
    def bias(self) -> None:
        """There is none; PEFT asks."""
        return

    def forward(self, x: Tensor) -> Tensor:
        """``[.., r] -> [.., d_out]``."""
        return nn.functional.linear(x, self.stated())

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        if partitioned(self.core):  # like the parameters beside it: empty, and its pieces are saved elsewhere
            destination[prefix + "weight"] = self.core.new_empty(0)
            return
        weight: Any = self.stated() if keep_vars else self.stated().detach()
        weight.factors = self._factors()
        destination[prefix + "weight"] = weight

    def _factors(self) -> tuple[Tensor, ...]:
        kept = (self.core, self.basis) if isinstance(self.basis, nn.Parameter) else (self.core,)
        return tuple(factor.detach().clone() for factor in kept)

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes them by position
        self, state_dict: dict[str, Tensor], prefix: str, *args: Any
    ) -> None:  # noqa: ANN401
        _, _, missing, _, errors = args
        weight = state_dict.get(prefix + "weight", self._put_together(state_dict, prefix))
        if weight is None:
            missing.append(prefix + "weight")
        elif weight.numel() > 0 or not partitioned(self.core):
            with whole(*self.parameters(), write=True), torch.no_grad():
                errors += [f"{prefix}{error}" for error in self._take(weight)]

    def _put_together(self, state: dict[str, Tensor], prefix: str) -> Tensor | None:
        """The weight of parameters under their own names: DeepSpeed's ``zero_to_fp32`` writes them so."""
        core, basis = state.get(prefix + "core"), state.get(prefix + "basis", self.basis.detach())
        if core is None:
            return None
        own = _product(basis, core.to(basis.device))
        weight: Any = own if self.kept is None else torch.cat([own, self.kept.to(own)], self.rank_side)
        weight.factors = (core, basis)
        return weight

    def _take(self, stated: Tensor) -> list[str]:
        """Make this the whole factor, or say why not."""
        shares, expected = self._shares(stated), tuple(self.stated().shape)
        if shares is None or tuple(stated.shape) != expected:
            return [f"weight is {tuple(stated.shape)}, expected {expected}."]
        (weight, kept), sent = shares, getattr(stated, "factors", (self.core,))
        free, weight_here = isinstance(self.basis, nn.Parameter), weight.to(self.basis.device)
        core, basis = self._sent_along(weight_here, sent) or factor(weight_here, self.basis, free=free)
        rounding = 1e-3 if weight.dtype == torch.float32 else 1e-2
        if not (basis.double() @ core.double() - weight_here).norm() <= rounding * weight_here.norm():
            return ["weight lies outside the span of this layer's basis: load the bases it was trained with."]
        self.core.copy_(core)
        self.basis.copy_(basis)
        if kept is not None:
            self.keep(kept.to(self.kept))
        return []

    def _sent_along(self, weight: Tensor, factors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor] | None:
        """The factors that came with the weight, where they are of these sizes and it is their product still."""
        core, basis = (*(t.to(self.basis.device) for t in factors), self.basis)[:2]
        fits = core.shape == self.core.shape and basis.shape == self.basis.shape
        return (core, basis) if fits and torch.equal(_product(basis, core), weight.to(core)) else None


def _product(basis: Tensor, core: Tensor) -> Tensor:
    return (basis @ core.to(basis.dtype)).to(core.dtype)


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
    # laid out row by row: DeepSpeed sends parameters round as bytes
    chosen = basis[:, :count].detach().float().clone(memory_format=torch.contiguous_format)
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
