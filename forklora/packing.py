"""Lets a model decode from weights laid out once for the processor's matrix kernels, instead of anew at every token.

Decisions: with few rows a bfloat16 product on a CPU spends as long on laying out its weight as on multiplying; for the
length of one sampling the frozen layers keep a packed copy, which costs their size in memory once more; nothing of the
model is changed, and where the kernels are missing nothing is packed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

WORTH = 16  # tokens to decode, from which on packing takes less time than it saves


@contextlib.contextmanager
def packed(model: nn.Module, *, tokens: int, leave: nn.Module | None = None) -> Iterator[None]:
    """Within the block, frozen bfloat16 ``nn.Linear`` layers on a CPU multiply from packed copies, without gradients.

    Args:
        model: the model, or any part of it.
        tokens: how many will be decoded; few are not worth it.
        leave: a module to leave as it is.
    """
    worth = tokens >= WORTH and not torch.is_grad_enabled() and _available()
    fitting = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not leave and _fits(m)] if worth else []
    chosen: list[nn.Linear] = []
    try:
        for module in fitting:
            module.forward = _product(module)  # pyright: ignore[reportAttributeAccessIssue] - as torch allows
            chosen.append(module)
        yield
    finally:
        for module in chosen:
            del module.forward


def _fits(module: nn.Linear) -> bool:
    if type(module) is not nn.Linear or "forward" in module.__dict__:
        return False
    weight = module.weight
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and not weight.requires_grad


def _available() -> bool:
    """Whether this build of torch has the operators that torch.compile lays weights out with."""
    operators = torch.ops.mkldnn
    return (
        torch.backends.mkldnn.is_available()
        and all(hasattr(operators, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))
        and operators._is_mkldnn_bf16_supported()
    )


def _product(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), None)
    bias = None if layer.bias is None else layer.bias.detach()

    def product(x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    return product
