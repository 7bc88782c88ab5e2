"""Sums up the Fisher of a policy coordinate by coordinate, beside the policy gradient that it caps.

Decisions: the score of a whole completion is squared, so each completion goes through the model alone; nothing but two
sums per weight is kept, and dense factors only for layers that are named; rewards enter the gradient and never the
Fisher. Source: "Fishing for the policy gradient", sections 2 to 4; "Low-rank in hidden space", section 6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor, distributed, nn

from forklora.backward import backward, layer_shape, listening
from forklora.collective import ranks, summed
from forklora.trace import Trace
from forklora.unembed import unwrap

_SLACK = 1e-4  # of the cap: what sums in float32 lose
_PROMPT = ("prompt_ids", "prompt_mask")
_COMPLETION = (
    "completion_ids",
    "completion_mask",
    "candidate_ids",
    "candidate_probs",
    "leak",
    "logprob",
    "spread",
    "delta",
)


class FisherSums:
    """Sums over any number of traces, for the weights of linear layers.

    With ``s_i`` the score of completion ``i``, the gradient of its log probability by a weight, ``fisher`` is ``F =
    mean s_i^2`` and ``gradient`` is ``G = mean A_i s_i``, both float32 ``[d_out, d_in]`` however a weight is stored.
    ``deviation`` is the root of the mean of ``A_i^2``, so that ``|G| <= deviation * sqrt(F)`` at every coordinate.

    Args:
        model: the policy that the traces were drawn from.
        layers: names of the layers.
        factored: those whose ``S = mean g g^T`` and ``H = mean x x^T`` over positions are kept, too, dense.

    Raises:
        ValueError: the model has no such layer, or a factored one is not among them.
    """

    def __init__(self, model: nn.Module, layers: Sequence[str], *, factored: Sequence[str] = ()) -> None:
        modules = dict(unwrap(model).named_modules())
        if unknown := [name for name in (*layers, *factored) if name not in modules or name not in layers]:
            raise ValueError(f"{', '.join(unknown[:3])}: no layers of the model, or none that are summed.")
        self.modules = {name: modules[name] for name in layers}
        self.count = 0
        self._factored = frozenset(factored)
        self._squares: dict[str, Tensor] = {}
        self._products: dict[str, Tensor] = {}
        self._outputs: dict[str, Tensor] = {}
        self._inputs: dict[str, Tensor] = {}
        self._positions = 0
        self._energy = 0.0
        self._score: dict[str, Tensor] = {}

    def add(self, model: nn.Module, trace: Trace, *, advantages: Float[Tensor, " n"]) -> None:
        """Run each completion alone, forward and backward, and add its score.

        Raises:
            ValueError: another number of advantages than rows, or the trace holds no backward signal.
        """
        if advantages.shape != trace.group.shape:
            raise ValueError(f"{list(advantages.shape)} advantages for {len(trace)} rows; give one for each.")
        for i, advantage in enumerate(advantages.tolist()):
            self.count += 1
            self._energy += advantage**2
            row = _alone(trace, i)
            if row is None:
                continue  # nothing was drawn: a score of zero
            self._positions += row.prompt_ids.shape[1] + row.completion_ids.shape[1] - 1
            with listening(self.modules, self._hear):
                backward(model, row, advantages=torch.ones(1))
            self._close(advantage)

    def all_reduce(self) -> None:
        """Add up the sums of all ranks, once, at the end; factors stay each rank's own. Every rank has to call this."""
        if ranks() == 1:
            return
        for name, module in self.modules.items():
            for sums in (self._squares, self._products):
                mine = sums.get(name)
                total = torch.zeros(layer_shape(module)) if mine is None else mine
                total = total.to(next(module.parameters()).device)
                distributed.all_reduce(total)
                sums[name] = total
        self.count, self._positions = summed(self.count), summed(self._positions)
        self._energy = summed(self._energy)

    def fisher(self, name: str) -> Float[Tensor, "o i"]:
        """``F`` of one layer."""
        return self._squares[name] / self.count

    def gradient(self, name: str) -> Float[Tensor, "o i"]:
        """``G`` of one layer."""
        return self._products[name] / self.count

    def factors(self, name: str) -> tuple[Float[Tensor, "o o"], Float[Tensor, "i i"]]:
        """``S`` and ``H`` of a factored layer, means over positions."""
        return self._outputs[name] / self._positions, self._inputs[name] / self._positions

    @property
    def layers(self) -> list[str]:
        """Layers that anything has flowed through."""
        return [name for name in self.modules if name in self._squares]

    @property
    def deviation(self) -> float:
        """Root of the mean of the squared advantages."""
        return (self._energy / max(self.count, 1)) ** 0.5

    @property
    def length(self) -> float:
        """Positions of a completion with its prompt, in the mean."""
        return self._positions / max(self.count, 1)

    def _hear(self, name: str, x: Tensor, g: Tensor) -> None:
        gs, xs = g.flatten(0, -2).float(), x.flatten(0, -2).float()
        found = gs.T @ xs
        self._score[name] = self._score[name] + found if name in self._score else found
        if name in self._factored:
            for sums, vectors in ((self._outputs, gs), (self._inputs, xs)):
                product = (vectors.T @ vectors).double()
                sums[name] = sums[name] + product if name in sums else product

    def _close(self, advantage: float) -> None:
        """Add the score of the completion that has gone through."""
        for name, score in self._score.items():
            if name not in self._squares:
                self._squares[name], self._products[name] = torch.zeros_like(score), torch.zeros_like(score)
            self._products[name].add_(score, alpha=advantage)
            self._squares[name].addcmul_(score, score)
        self._score.clear()


def _alone(trace: Trace, i: int) -> Trace | None:
    """One row without its padding; None where nothing was drawn."""
    row = trace.select([i])
    drawn = row.completion_mask[0].nonzero()
    if not len(drawn):
        return None
    start, end = row.prompt_ids.shape[1] - int(row.prompt_mask.sum()), int(drawn.max()) + 1
    cut = {name: getattr(row, name)[:, start:] for name in _PROMPT}
    cut |= {name: value[:, :end] for name in _COMPLETION if (value := getattr(row, name)) is not None}
    return replace(row, **cut)


@dataclass(frozen=True)
class Cap:
    """A cap beside what it caps.

    Attributes:
        broken: coordinates above it.
        numbers: coordinates in all.
        tightness: mean of what was found over the cap, where the cap is not zero; None where it is nowhere.
        energy_broken: share of the gradient's energy in coordinates above the cap; None for a zero gradient.
    """

    broken: int
    numbers: int
    tightness: float | None
    energy_broken: float | None


def fisher_cap(gradient: Float[Tensor, "*s"], fisher: Float[Tensor, "*s"], *, deviation: float) -> Cap:
    """``|G_i| <= std(A) sqrt(F_i)``, coordinate by coordinate.

    It holds by Cauchy and Schwarz where both were summed over the same completions; of others it holds for the
    expectations only, so what is broken there is noise.
    """
    return _capped(gradient, deviation * fisher.clamp_min(0).sqrt())


def kronecker_cap(
    gradient: Float[Tensor, "o i"],
    factors: tuple[Float[Tensor, "o o"], Float[Tensor, "i i"]],
    *,
    deviation: float,
    length: float,
) -> Cap:
    """``|gamma_ij| <= std(A) sqrt(T sigma_i eta_j)`` for ``gamma = P^T G Q``, in the eigenbases of ``S`` and ``H``.

    ``T`` is the number of positions. K-FAC takes signal and input for independent, so this is an approximation, and the
    share that breaks it says how good a one.
    """
    (sigma, p), (eta, q) = (torch.linalg.eigh(factor.double()) for factor in factors)
    found = p.T @ gradient.double() @ q
    cap = deviation * (length * sigma.clamp_min(0)[:, None] * eta.clamp_min(0)[None]).sqrt()
    return _capped(found, cap)


def _capped(found: Tensor, cap: Tensor) -> Cap:
    sizes, floor = found.abs(), _SLACK * float(cap.max())
    over = sizes > cap * (1 + _SLACK) + floor * _SLACK
    known, energy = cap > floor, float(found.double().square().sum())
    return Cap(
        broken=int(over.sum()),
        numbers=found.numel(),
        tightness=float((sizes[known] / cap[known]).double().mean()) if known.any() else None,
        energy_broken=float(found[over].double().square().sum()) / energy if energy > 0 else None,
    )


def top_coordinates(
    values: Mapping[str, Float[Tensor, "*s"]], *, share: float = 0.01
) -> dict[str, Int64[Tensor, " n"]]:
    """The largest coordinates of all layers together: flat indices in each layer, ascending.

    Layers are looked at one after the other, so no more than the coordinates that are kept is ever held beside one.

    Args:
        values: numbers of each layer, such as the Fisher, or sizes of a gradient.
        share: of all coordinates that is kept, one at least.

    Raises:
        ValueError: a share outside 0..1, or nothing to choose from.
    """
    numbers = sum(value.numel() for value in values.values())
    if not 0 < share <= 1 or numbers == 0:
        raise ValueError(f"share={share} must lie above 0 and at most at 1, and {numbers} coordinates must be some.")
    kept = max(1, round(share * numbers))
    best, layer, place = torch.zeros(0), torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long)
    for i, value in enumerate(values.values()):
        found, index = value.flatten().float().topk(min(kept, value.numel()))
        best, layer = torch.cat([best, found]), torch.cat([layer, torch.full_like(index, i)])
        place = torch.cat([place, index])
        chosen = best.topk(min(kept, len(best))).indices
        best, layer, place = best[chosen], layer[chosen], place[chosen]
    return {name: place[layer == i].sort().values for i, name in enumerate(values)}


def membership(before: Mapping[str, Int64[Tensor, " n"]], after: Mapping[str, Int64[Tensor, " m"]]) -> float:
    """Share of the coordinates of ``before`` that are among those of ``after``.

    Raises:
        ValueError: ``before`` holds none.
    """
    total = sum(len(index) for index in before.values())
    if total == 0:
        raise ValueError("there are no coordinates to look for.")
    empty = torch.zeros(0, dtype=torch.long)
    return sum(int(torch.isin(index, after.get(name, empty)).sum()) for name, index in before.items()) / total
