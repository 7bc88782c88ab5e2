"""Checks on real rollouts what theory says of the backward signal: where it is large, and what lies outside the span.

Decisions: nothing is averaged before it is compared; mass outside the stored candidates counts as far as it can lie, so
that a bound stays one; everything in float64. Source: "Low-rank in hidden space", sections 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from forklora.forks import Forks, span_differences
from forklora.trace import Trace

_SLACK, _ROUNDING = 1e-4, 1e-6  # of a bound, and of 4 B^2: what recording in float32 loses
Rows = Callable[[Int64[Tensor, " n"]], Float[Tensor, "n d"]]


@dataclass(frozen=True, eq=False)
class SpreadBounds:
    """``tr C_t`` of every drawn position beside its two bounds.

    Attributes:
        spread: ``tr C_t = E|delta_t|^2``, as the sampler recorded it over the whole vocabulary.
        near: ``sum_a mu_a |w_a - w_top|^2`` over the stored candidates, and ``4 B^2`` for each mass outside them.
        far: ``4 B^2 (1 - max mu)``.
        reach: ``4 B^2``.
    """

    spread: Float[Tensor, " n"]
    near: Float[Tensor, " n"]
    far: Float[Tensor, " n"]
    reach: float

    @property
    def violations(self) -> tuple[int, int]:
        """Positions where ``spread <= near``, and where ``near <= far``, does not hold."""
        pairs = ((self.spread, self.near), (self.near, self.far))
        first, second = (int((low > high * (1 + _SLACK) + _ROUNDING * self.reach).sum()) for low, high in pairs)
        return first, second


@dataclass(frozen=True, eq=False)
class Span:
    """The span of differences of the candidates' output vectors.

    Attributes:
        basis: orthonormal columns, those of most energy first.
        values: eigenvalues of the sum of the candidates' covariances, descending, as many as columns.
        counted: ``sum_t (|K_t| - 1)``, which no dimension exceeds.
    """

    basis: Float[Tensor, "d k"]
    values: Float[Tensor, " k"]
    counted: int

    def dimension(self, share: float) -> int:
        """Directions that hold this share of the energy."""
        held = self.values.cumsum(0) / self.values.sum()
        return int((held < share * (1 - 1e-12)).sum()) + 1 if len(self.values) else 0


def spread_bounds(trace: Trace, rows_of: Rows, *, largest: float, temperature: float = 1.0) -> SpreadBounds:
    """The recorded ``tr C_t`` with both bounds of theory, for every position that was drawn.

    Args:
        trace: rollouts with their spread.
        rows_of: output vectors ``w_a`` of token ids, without temperature.
        largest: ``B``, the largest norm of an output vector.
        temperature: of the sampler.

    Raises:
        ValueError: the trace holds no spread.
    """
    if trace.spread is None:
        raise ValueError("the trace holds no spread tr C: sample it with record=True.")
    drawn = trace.completion_mask
    ids, probs = trace.candidate_ids[drawn], trace.candidate_probs[drawn].double()
    known = ids >= 0
    tokens, place = ids[known].unique(return_inverse=True)
    table = rows_of(tokens).double().cpu() / temperature
    index = torch.zeros_like(ids)
    index[known] = place
    reach = 4 * (largest / temperature) ** 2
    near = reach * trace.leak[drawn].double()
    for start in range(0, len(ids), 4096):
        part = slice(start, start + 4096)
        vectors = table[index[part]]
        near[part] += (probs[part] * (vectors - vectors[:, :1]).square().sum(-1)).sum(-1)
    far = reach * (1 - probs[:, 0]).clamp_min(0)
    return SpreadBounds(trace.spread[drawn].double(), near, far, reach)


def fork_span(forks: Forks, rows_of: Rows, *, temperature: float = 1.0) -> Span:
    """The span ``D`` of the forks; its covariance is summed up in pieces, so any number of forks will do."""
    counted = int(((forks.ids >= 0).sum(-1) - 1).sum())
    total: Tensor | None = None
    for start in range(0, len(forks), 1024):
        rows = span_differences(forks.select(slice(start, start + 1024)), rows_of).double() / temperature
        total = rows.T @ rows if total is None else total + rows.T @ rows
    if total is None:
        width = rows_of(torch.zeros(1, dtype=torch.long)).shape[1]
        return Span(torch.zeros(width, 0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64), counted)
    values, vectors = torch.linalg.eigh(total.cpu())
    values, vectors = values.flip(0), vectors.flip(1)
    kept = values > 1e-10 * values[0]
    return Span(vectors[:, kept], values[kept], counted)


def outside_span(trace: Trace, basis: Float[Tensor, "d k"]) -> Float[Tensor, " n"]:
    """``|(I - P) delta_t|^2`` of every drawn position, ``P`` the projector on the columns of the basis.

    Its mean is at most ``4 B^2`` times the mean leak of the candidate sets whose differences span the basis.

    Raises:
        ValueError: the trace holds no backward signal.
    """
    if trace.delta is None:
        raise ValueError("the trace holds no backward signal delta: sample it with record=True.")
    delta = trace.delta[trace.completion_mask].double()
    return (delta - (delta @ basis) @ basis.T).square().sum(-1)
