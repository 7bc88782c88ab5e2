"""Lets a model decode from weights laid out once for the processor's matrix kernels, instead of anew at every token.

Decisions: with few rows a bfloat16 product on a CPU spends as long on laying out its weight as on multiplying, and a
low-rank term as long on small steps as on numbers. For the length of one sampling, layers that read the same input
(queries, keys and values; gate and up) keep one packed copy with the factors of their low-rank terms behind it, so that
all of them are one product and one sum. Which layers these are is seen in the first call. The copy costs the frozen
layers' size in memory once more; nothing of the model is changed, and where the kernels are missing nothing is packed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from forklora.lowrank import split_factor

WORTH = 16  # tokens to decode, from which on packing takes less time than it saves
_ALIGNED = 32  # columns that the kernels work on together


class LinearMap(NamedTuple):
    """What a layer computes: ``x weight^T + bias + (x a^T) b^T``, with ``a [r, i]`` and ``b [o, r]`` or neither.

    A layer that is more than an ``nn.Linear`` gives its own by a method ``linear_map() -> LinearMap | None``.
    """

    weight: Tensor
    bias: Tensor | None
    a: Tensor | None = None
    b: Tensor | None = None


@contextlib.contextmanager
def packed(model: nn.Module, *, tokens: int, leave: nn.Module | None = None) -> Iterator[None]:
    """Within the block, frozen bfloat16 linear layers on a CPU multiply from packed copies, without gradients.

    Args:
        model: the model, or any part of it.
        tokens: how many will be decoded; few are not worth it.
        leave: a module to leave as it is.
    """
    worth = tokens >= WORTH and not torch.is_grad_enabled() and _available()
    maps = _maps(model, leave=leave) if worth else {}
    first, chosen = _FirstCalls(), list[nn.Module]()
    try:
        for module, found in maps.items():
            module.forward = first.watch(module, found)  # pyright: ignore[reportAttributeAccessIssue] - torch allows it
            chosen.append(module)
        yield
    finally:
        for module in chosen:
            del module.forward


def _maps(model: nn.Module, *, leave: nn.Module | None) -> dict[nn.Module, LinearMap]:
    """The layers to pack; what stands inside one of them is not packed again."""
    found: dict[nn.Module, LinearMap] = {}
    inside: set[nn.Module] = set()
    for module in model.modules():
        one = None if module is leave or module in inside else _map(module)
        if one is not None and _fits(one.weight) and "forward" not in module.__dict__:
            found[module] = one
            inside.update(module.modules())
    return found


def _map(module: nn.Module) -> LinearMap | None:
    if type(module) is nn.Linear:
        return LinearMap(module.weight, module.bias)
    own = getattr(module, "linear_map", None)
    return own() if own else None


def _fits(weight: Tensor) -> bool:
    whole = weight.numel() > 0  # what ZeRO-3 has partitioned is empty between calls
    return whole and weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and not weight.requires_grad


def _available() -> bool:
    """Whether this build of torch has the operators that torch.compile lays weights out with."""
    operators = torch.ops.mkldnn
    return (
        torch.backends.mkldnn.is_available()
        and all(hasattr(operators, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))
        and operators._is_mkldnn_bf16_supported()
    )


class _FirstCalls:
    """Finds layers that are called with the same tensor one after another; their second call packs them."""

    def __init__(self) -> None:
        self.latest: tuple[Tensor, _Together] | None = None

    def watch(self, module: nn.Module, own: LinearMap) -> Callable[..., Tensor]:
        """A ``forward`` for the module."""
        plain, together = module.forward, None

        def forward(x: Tensor, *args: object, **kwargs: object) -> Tensor:
            nonlocal together
            if together is not None and not args and not kwargs and x.dtype == torch.bfloat16:
                found = together.product(module, x)
                return plain(x) if found is None else found
            if together is None:
                together = self._joined(x)
                together.maps[module] = own
                self.latest = x, together
            return plain(x, *args, **kwargs)

        return forward

    def _joined(self, x: Tensor) -> _Together:
        """Those that were called with the same tensor just before, unless they are packed already."""
        if self.latest is not None and self.latest[0] is x and self.latest[1].weight is None:
            return self.latest[1]
        return _Together()


@dataclass(eq=False)
class _Together:
    """Layers that read the same input: the first that is asked finds the outputs of all, the others take theirs."""

    maps: dict[nn.Module, LinearMap] = field(default_factory=dict)
    weight: Tensor | None = None
    bias: Tensor | None = None
    up: Tensor | None = None
    waiting: tuple[Tensor, dict[nn.Module, Tensor]] | None = None

    def product(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """The module's output; None if another has been called with something else meanwhile."""
        if module is next(iter(self.maps)):
            self.waiting = x, self._outputs(x)
        if self.waiting is None or self.waiting[0] is not x:
            return None
        found = self.waiting[1].pop(module, None)
        if not self.waiting[1]:
            self.waiting = None
        return found

    def _outputs(self, x: Tensor) -> dict[nn.Module, Tensor]:
        if self.weight is None:
            self._pack()
        whole = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        sizes = [len(one.weight) for one in self.maps.values()]
        result = whole[..., : sum(sizes)]
        if self.up is not None:
            rank, rows = len(self.up), whole.flatten(0, -2)
            coarse, fine = (rows[:, sum(sizes) + i * rank : sum(sizes) + (i + 1) * rank] for i in (0, 1))
            rows[:, : sum(sizes)].addmm_(coarse + fine, self.up)
        return dict(zip(self.maps, result.split(sizes, -1), strict=True))

    def _pack(self) -> None:
        maps = list(self.maps.values())
        rows = [one.weight.detach() for one in maps]
        ranked = [(one.a, one.b) for one in maps if one.a is not None and one.b is not None]
        if ranked:
            split = [split_factor(a.detach(), rows[0].dtype) for a, _ in ranked]
            rows += [coarse for coarse, _ in split] + [fine for _, fine in split]
            self.up = self._beside_each_other(maps).to(rows[0].dtype)
        height = sum(map(len, rows))
        rows.append(rows[0].new_zeros(-height % _ALIGNED, rows[0].shape[1]))
        self.weight = torch.ops.mkldnn._reorder_linear_weight(torch.cat(rows), None)
        if any(one.bias is not None for one in maps):
            biases = [one.weight.new_zeros(len(one.weight)) if one.bias is None else one.bias.detach() for one in maps]
            rest = height + len(rows[-1]) - sum(map(len, biases))
            self.bias = torch.cat([*biases, biases[0].new_zeros(rest)])

    @staticmethod
    def _beside_each_other(maps: list[LinearMap]) -> Tensor:
        """The factors ``b^T`` of all layers as the blocks of one matrix ``[all ranks, all outputs]``."""
        blocks = [
            one.weight.new_zeros(0, len(one.weight)).float() if one.b is None else one.b.detach().T for one in maps
        ]
        return torch.block_diag(*blocks)
