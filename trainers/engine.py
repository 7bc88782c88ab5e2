"""Changes whole gradients under DeepSpeed, between the exchange of gradients and the optimizer's step.

Decisions: ZeRO hands the optimizer flat pieces, in which a matrix can no longer be seen; what is meant for matrices
(a step of fixed length, a projection) is done on the full gradients by DeepSpeed's own reading and writing of them,
which works in every stage, and the optimizer is plain SGD. Every rank takes part in every reading, in one order.

    before_step(engine, lambda: change_gradients(pairs_of_parameter_and_change))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from forklora.optim import project, step_factors

_MARK = "_forklora_before_step"


def before_step(engine: Any, function: Callable[[], None]) -> None:  # noqa: ANN401 - a DeepSpeedEngine
    """Have the engine call the function at every boundary, with all gradients exchanged, before its optimizer steps.

    An engine that has a function already gets no second one.
    """
    if getattr(engine, _MARK, None) is not None:
        return
    step = engine.step

    def changed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if engine.is_gradient_accumulation_boundary():
            function()
        return step(*args, **kwargs)

    setattr(engine, _MARK, function)
    engine.step = changed


def fix_length(parameters: Sequence[tuple[nn.Parameter, float]], *, evenly: bool) -> None:
    """Scale full gradients so that plain SGD of rate ``lr`` takes the step of ``StepLengthSGD`` of length ``lr``.

    Args:
        parameters: trained parameters with their scaling ``s``, the same on every rank.
        evenly: every matrix gets the same share of the length.

    Raises:
        FloatingPointError: a gradient is not finite; on every rank alike, and no step was taken.
    """
    for (parameter, _), factor in zip(parameters, length_factors(parameters, evenly=evenly), strict=True):
        full = full_gradient(parameter)
        if full is not None:
            put_gradient(parameter, full * factor)


def length_factors(parameters: Sequence[tuple[nn.Parameter, float]], *, evenly: bool) -> list[Tensor]:
    """Factors by which full gradients become a step of length 1; arguments and errors are those of fix_length."""
    norms = []
    for parameter, _ in parameters:
        full = full_gradient(parameter)
        norms.append(torch.zeros(()) if full is None else torch.linalg.vector_norm(full, dtype=torch.float64))
    return step_factors(norms, [s for _, s in parameters], evenly=evenly)


def project_gradients(pairs: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
    """Replace the full gradient ``G`` of each weight ``[d_out, d_in]`` by ``U U^T G``, with its ``U [d_out, r]``.

    Plain SGD, with or without momentum, then does what ``ProjectedSGD`` does, under any stage.
    """
    for parameter, basis in pairs:
        full = full_gradient(parameter)
        if full is not None:
            shape = getattr(parameter, "ds_shape", parameter.shape)
            put_gradient(parameter, project(full.view(shape), basis).to(full.dtype))


def full_gradient(parameter: nn.Parameter) -> Tensor | None:
    """The whole gradient, exchanged between ranks; None where there is none. Every rank has to ask."""
    if not managed(parameter):
        return parameter.grad
    from deepspeed.utils import safe_get_full_grad

    return safe_get_full_grad(parameter)


def put_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Replace the whole gradient. Every rank has to, with the same one."""
    if not managed(parameter):
        parameter.grad = gradient
        return
    from deepspeed.utils import safe_set_full_grad

    if hasattr(parameter, "ds_id"):
        # ZeRO-3 takes an equal share for every rank, also where the number of ranks does not divide the whole
        gradient = nn.functional.pad(gradient.flatten(), (0, -gradient.numel() % distributed.get_world_size()))
    safe_set_full_grad(parameter, gradient)


@torch.no_grad()
def put_parameter(parameter: Tensor, value: Tensor) -> None:
    """Set a trained parameter, and the copy that the optimizer of ZeRO-1 or ZeRO-2 steps. Every rank has to.

    Raises:
        ValueError: ZeRO-3 holds it in pieces.
    """
    if hasattr(parameter, "ds_id"):
        raise ValueError("ZeRO-3 holds the parameter in pieces: set it under ZeRO-2 or lower.")
    parameter.copy_(value)
    if managed(parameter):
        from deepspeed.utils import safe_set_full_fp32_param

        safe_set_full_fp32_param(parameter, value.float())


def managed(parameter: Tensor) -> bool:
    """Whether a DeepSpeed engine keeps this parameter's gradient, and the copy that is stepped, elsewhere."""
    return any(hasattr(parameter, mark) for mark in ("ds_id", "_hp_mapping", "_hp_grad"))
