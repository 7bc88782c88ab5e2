"""Measures what an update looks like: rank, energy, share of unchanged weights, overlap of spans, captured share.

Decisions: everything is computed in float64; a figure that does not exist (the stable rank of a zero matrix) raises
instead of being made up. Source of all figures: "Low-rank in hidden space", sections 6 and 8.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def numerical_rank(m: Float[Tensor, "o i"], tolerance: float = 1e-5) -> int:
    """Number of singular values above ``tolerance`` times the largest one; 0 for a zero matrix.

    A weak floor of noise makes any matrix full rank in this sense: read it beside :func:`stable_rank`.
    """
    values = _singular_values(m)
    return int((values > tolerance * values.max()).sum())


def stable_rank(m: Float[Tensor, "o i"]) -> float:
    """``|m|_F^2 / |m|_2^2``, from 1 to the rank.

    Raises:
        ValueError: the matrix is zero.
    """
    energy = _energies(m)
    return float(energy.sum() / energy[0])


def top_energy(m: Float[Tensor, "o i"], k: int = 16) -> float:
    """Share of ``|m|_F^2`` in the ``k`` largest singular values, 0..1.

    Raises:
        ValueError: the matrix is zero, or ``k`` below 1.
    """
    if k < 1:
        raise ValueError(f"k={k} must be at least 1.")
    energy = _energies(m)
    return float(energy[:k].sum() / energy.sum())


def unchanged_share(
    before: Float[Tensor, "*s"],
    after: Float[Tensor, "*s"],
    *,
    relative: float | None = None,
    absolute: float | None = None,
) -> float:
    """Share of weights that did not change at bfloat16 precision, 0..1.

    Unchanged means equal after both are rounded to bfloat16. With ``absolute``, differing by no more than that after
    this rounding (Mukherjee et al., 2025, use 1e-5); with ``relative``, on the numbers as given,
    ``|a - b| <= relative * max(|a|, |b|)`` (Zhu et al., 2025, use 1e-3).

    Raises:
        ValueError: different shapes, no weights at all, numbers that are not finite, or both thresholds.
    """
    if before.shape != after.shape or not before.numel():
        raise ValueError(f"need weights of one shape; got {list(before.shape)} before and {list(after.shape)} after.")
    if not (before.isfinite().all() and after.isfinite().all()):
        raise ValueError("some weights are not finite; a share of unchanged weights would hide it.")
    if relative is not None and absolute is not None:
        raise ValueError(f"relative={relative} and absolute={absolute} are two definitions: give one of them.")
    if relative is not None:
        old, new = before.double(), after.double()
        return float(((new - old).abs() <= relative * torch.maximum(old.abs(), new.abs())).double().mean())
    old, new = before.bfloat16(), after.bfloat16()
    same = old == new if absolute is None else (new.float() - old.float()).abs() <= absolute
    return float(same.double().mean())


def overlap(a: Float[Tensor, "d k"], b: Float[Tensor, "d m"]) -> float:
    """Overlap ``|Q_a^T Q_b|_F^2 / min(k, m)`` of two column spans: 1 if one holds the other, 0 if orthogonal.

    ``Q_a``, ``Q_b`` are orthonormal bases and k, m their dimensions (dependent columns count once). Independent random
    spans give ``max(k, m) / d`` on average: print that null beside it.

    Raises:
        ValueError: columns of different length, or a set without any direction.
    """
    if a.shape[0] != b.shape[0]:
        raise ValueError(f"columns of length {a.shape[0]} and {b.shape[0]} lie in different spaces.")
    qa, qb = _orthonormal(a), _orthonormal(b)
    return float((qa.T @ qb).square().sum() / min(qa.shape[1], qb.shape[1]))


def principal_angles(a: Float[Tensor, "d k"], b: Float[Tensor, "d m"]) -> Float[Tensor, " n"]:
    """Angles between two column spans in degrees, smallest first, as many as the smaller span has dimensions.

    0 for a direction the spans share, 90 for one orthogonal to all of the other. Taken from sines where they are small
    and from cosines where those are, so that equal spans give zero up to rounding (Bjoerck and Golub, 1973).

    Raises:
        ValueError: columns of different length, or a set without any direction.
    """
    if a.shape[0] != b.shape[0]:
        raise ValueError(f"columns of length {a.shape[0]} and {b.shape[0]} lie in different spaces.")
    qa, qb = sorted((_orthonormal(a), _orthonormal(b)), key=lambda q: q.shape[1])
    cosines = torch.linalg.svdvals(qb.T @ qa).clamp(0, 1)
    sines = torch.linalg.svdvals(qa - qb @ (qb.T @ qa)).clamp(0, 1).flip(0)
    return torch.where(cosines > 0.5**0.5, sines.asin(), cosines.acos()).rad2deg()


def captured_share(
    gradient: Float[Tensor, "o i"],
    *,
    output: Float[Tensor, "o k"] | None = None,
    input: Float[Tensor, "i m"] | None = None,
) -> float:
    """Share of a gradient's energy inside the given bases, ``|P_out G P_in|_F^2 / |G|_F^2``, 0..1.

    Args:
        gradient: ``G``, one row per output of the layer.
        output: columns that span the output side; None leaves that side free. A random one captures ``k / o``.
        input: columns that span the input side; None leaves that side free. A random one captures ``m / i``.

    Raises:
        ValueError: the gradient is zero, or a basis lies in another space.
    """
    inside = gradient.double()
    total = inside.square().sum()
    if not total > 0:
        raise ValueError("the gradient is zero or NaN: no share of it lies anywhere.")
    for name, basis, size in (("output", output, gradient.shape[0]), ("input", input, gradient.shape[1])):
        if basis is not None and basis.shape[0] != size:
            raise ValueError(f"the {name} basis {list(basis.shape)} does not fit the gradient {list(gradient.shape)}.")
    if output is not None:
        inside = _orthonormal(output).T @ inside
    if input is not None:
        inside = inside @ _orthonormal(input)
    return float(inside.square().sum() / total)


def _singular_values(m: Tensor) -> Tensor:
    if m.ndim != 2 or not m.numel():
        raise ValueError(f"need a matrix with entries; got shape {list(m.shape)}.")
    if not m.isfinite().all():
        raise ValueError("the matrix holds NaN or infinity, so it has no singular values.")
    return torch.linalg.svdvals(m.double())


def _energies(m: Tensor) -> Tensor:
    energy = _singular_values(m).square()
    if not energy[0] > 0:
        raise ValueError("the matrix is zero: it has no energy to divide.")
    return energy


def _orthonormal(columns: Tensor) -> Tensor:
    """Orthonormal basis of the columns' span; directions that are rounding of the given type are left out."""
    vectors, values, _ = torch.linalg.svd(columns.double(), full_matrices=False)
    precision = torch.finfo(torch.promote_types(columns.dtype, torch.float32)).eps
    kept = values > max(columns.shape) * precision * values.max()
    if not kept.any():
        raise ValueError(f"the columns {list(columns.shape)} span nothing: all of them are zero.")
    return vectors[:, kept]
