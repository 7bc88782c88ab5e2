"""SGD that stays in a given basis, and SGD whose every step moves the weights by a stated length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim import Optimizer

_PIECES = (
    "A flat or empty weight is a piece that DeepSpeed ZeRO has cut (stages 1 to 3): use plain SGD and "
    "forklora.trainers.engine.project_gradients before each step, or stage 0."
)


_LOOKS, _CLOSE = 6, 0.2  # looks at a length; how close, in its logarithm, is close enough


class StepLengthSGD(Optimizer):
    """Plain SGD whose step has a fixed Frobenius length in weight space: the number means the same for every kind.

    For an adapter with orthonormal frozen bases and scaling ``s`` a parameter change moves the weight by
    ``|dW| = s |d theta|``, and gradient descent on the weight inside the span is ``d theta = -eta g / s^2``. The rate
    ``eta`` is chosen anew at every step so that over all parameters ``sqrt(sum |dW|^2) = lr``:

        eta = lr / sqrt(sum_i |g_i|^2 / s_i^2)

    With ``evenly`` every matrix moves by the same length instead, ``lr / sqrt(n)`` for each of the ``n`` that have a
    gradient, so that layers with little gradient move too; the sum of squares is the same ``lr^2``.

    Neither the size of the gradient, nor the loss's normalization, nor ``lora_alpha`` changes the path. A gradient
    that is exactly zero leaves everything as it was. No state is kept. For the trained-basis forms and vanilla LoRA,
    whose factors are not orthonormal, ``lr`` is the length in the factors' own coordinates times ``s``.

    Args:
        params: parameters, or groups that may carry ``scaling`` (``s``, default 1).
        lr: length of a step; weight units, over all matrices together.
        evenly: give every matrix the same share of it.
    """

    def __init__(self, params: Iterable[Any], lr: float, *, evenly: bool = False) -> None:
        if not lr >= 0:
            raise ValueError(f"lr={lr} is the length of a step and cannot be negative.")
        super().__init__(params, {"lr": lr, "scaling": 1.0})
        self.evenly = evenly

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401
        """Move all parameters; the global norm is taken over every group."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moved = [(p, g["lr"], g["scaling"]) for g in self.param_groups for p in g["params"] if p.grad is not None]
        # in float64: the square of a gradient of 1e-23 is nothing in float32, of 1e20 infinite
        norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p, _, _ in moved]
        factors = step_factors(norms, [s for _, _, s in moved], evenly=self.evenly)
        for (p, lr, _), factor in zip(moved, factors, strict=True):
            if factor > 0:
                p.sub_((p.grad.float() * (lr * factor)).to(p.dtype))
        return loss


def step_factors(norms: Sequence[Tensor], scalings: Sequence[float], *, evenly: bool) -> list[Tensor]:
    """Factors ``c_i`` with which ``d theta_i = -lr c_i g_i`` is a step of :class:`StepLengthSGD`; 0 where ``g_i`` is.

    Args:
        norms: ``|g_i|``, float64.
        scalings: ``s_i``.
        evenly: the same length for every matrix that has a gradient.

    Raises:
        FloatingPointError: a norm is not finite.
    """
    own = [norm / s for norm, s in zip(norms, scalings, strict=True)]
    whole = torch.stack(own).square().sum().sqrt() if own else torch.zeros(())
    if not torch.isfinite(whole):
        raise FloatingPointError(f"the gradient's norm is {whole.item()}: the step was not taken.")
    count = sum(bool(norm > 0) for norm in own)
    lengths = [norm * count**0.5 if evenly else whole for norm in own]
    return [
        1 / (s * s * length) if norm > 0 else torch.zeros_like(norm)
        for norm, s, length in zip(own, scalings, lengths, strict=True)
    ]


def fitting_length(change: Callable[[float], float], *, wanted: float, start: float) -> float:
    """Length ``c`` with ``change(c)`` close to ``wanted``, for a change that is about proportional to the length.

    Each look takes the next length in proportion, a hundredfold at most. It ends within a fifth of what is wanted, with
    the length that proportion then gives, or after six looks with the best length seen.

    Args:
        change: of the policy by a step of this length; a value that is not finite means that it is far too long.
        wanted: above 0.
        start: first length that is looked at.
    """
    seen: dict[float, float] = {}
    length = start
    for _ in range(_LOOKS):
        found = change(length)
        if not math.isfinite(found):
            length /= 100
            continue
        proportion = min(max(wanted / found, 0.01), 100.0) if found > 0 else 100.0
        if abs(math.log(proportion)) < _CLOSE:
            return length * proportion
        seen[length] = abs(math.log(proportion))
        length *= proportion
    return min(seen, key=lambda c: seen[c]) if seen else length


def project(gradient: Float[Tensor, "o i"], basis: Float[Tensor, "o r"]) -> Float[Tensor, "o i"]:
    """``U U^T G`` in float32, for orthonormal columns of ``U``."""
    basis = basis.to(gradient.device, torch.float32)
    return basis @ (basis.T @ gradient.float())


class ProjectedSGD(Optimizer):
    """SGD on dense weights whose update stays in a basis: ``W <- W - lr U (momentum * V + U^T G)``.

    The momentum ``V`` is kept in the basis's own coordinates ``[r, d_in]``. Every weight must be a whole matrix when
    the step is taken, as without DeepSpeed and under its stage 0. ZeRO 1 to 3 replace weights by flat pieces: that is
    refused by name, and ``forklora.trainers.engine.project_gradients`` with plain SGD takes the same steps there.

    Args:
        params_with_bases: pairs ``(weight [d_out, d_in], U [d_out, r])`` with orthonormal columns.
        lr: learning rate, as for full-weight SGD.
        momentum: 0 keeps no state.
    """

    def __init__(self, params_with_bases: Iterable[tuple[Tensor, Tensor]], lr: float, *, momentum: float = 0.0) -> None:
        if not lr >= 0 or not 0 <= momentum < 1:
            raise ValueError(f"lr={lr} cannot be negative and momentum={momentum} must lie in [0, 1).")
        groups = []
        for weight, basis in params_with_bases:
            if weight.dim() != 2 or basis.dim() != 2 or basis.shape[0] != weight.shape[0]:
                raise ValueError(
                    f"weight {tuple(weight.shape)} with basis {tuple(basis.shape)}: needed are [d_out, d_in] and "
                    f"[d_out, r]. {_PIECES}"
                )
            groups.append({"params": [weight], "basis": basis})
        super().__init__(groups, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401
        """One projected step for every weight that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weight, basis = group["params"][0], group["basis"]
            if weight.grad is None:
                continue
            if weight.dim() != 2 or weight.shape[0] != basis.shape[0]:
                raise ValueError(f"the weight {tuple(weight.shape)} is no matrix of {len(basis)} rows. {_PIECES}")
            inside = basis.T.to(weight.device, torch.float32) @ weight.grad.float()
            if group["momentum"]:
                kept = self.state[weight].setdefault("momentum", torch.zeros_like(inside))
                inside = kept.mul_(group["momentum"]).add_(inside)
            weight.sub_((group["lr"] * (basis.to(weight.device, torch.float32) @ inside)).to(weight.dtype))
        return loss
