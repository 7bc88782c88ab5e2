"""Measures one weight's update by its spectrum: exactly where that is cheap, by a randomized SVD with its error above.

Decisions: nothing here holds more than one matrix and a few of its directions; every random number comes from a
generator of its own, so that the caller's state is left alone and equal matrices give equal figures, bit for bit; a
figure that does not exist is None. Source of the figures: "Low-rank in hidden space", sections 6 and 8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from forklora.measure import overlap, principal_angles, unchanged_share

RELATIVE = 1e-3
ABSOLUTE = 1e-5
_NEGLIGIBLE = 1e-5  # share of the largest singular value
_ENOUGH, _ROUNDS = 1e-3, 12  # residual at which the iteration stops, and how often it turns at most
_PIECE = 1 << 22  # numbers looked at together


@dataclass(frozen=True, eq=False)
class Spectrum:
    """What the singular values ``s_1 >= s_2 >= ..`` of a matrix say.

    Attributes:
        norm: ``|A|_F``, exact.
        spectral_norm: ``s_1``.
        stable_rank: ``|A|_F^2 / s_1^2``; None for a zero matrix.
        top_energy: share of ``|A|_F^2`` in the ``top`` largest; None for a zero matrix.
        numerical_rank: values above 1e-5 of the largest; 0 for a zero matrix, None where not all were computed.
        exact: whether all singular values were computed, in float64.
        error: largest relative residual ``|A v - s u| / s`` of the leading triples; some singular value of the matrix
            lies within that share of each, and none of the values given is too large but for rounding. 0 when exact.
        left: leading left singular vectors, at most ``top``, none whose value is below 1e-5 of the largest; None for a
            zero matrix.
        right: the same on the right.
    """

    norm: float
    spectral_norm: float
    stable_rank: float | None
    top_energy: float | None
    numerical_rank: int | None
    exact: bool
    error: float
    left: Float[Tensor, "o k"] | None
    right: Float[Tensor, "i k"] | None


@dataclass(frozen=True)
class Unchanged:
    """Shares of weights that did not change, 0..1, by three definitions.

    Attributes:
        bf16: equal after both are rounded to bfloat16.
        relative: ``|a - b| <= 1e-3 max(|a|, |b|)`` on the numbers as given (Zhu et al., arXiv 2511.08567).
        absolute: ``|a - b| <= 1e-5`` after both are rounded to bfloat16 (Mukherjee et al., arXiv 2505.11711).
    """

    bf16: float
    relative: float
    absolute: float


@dataclass(frozen=True)
class Rotation:
    """Principal angles between the leading singular subspaces of a weight before and after, in degrees."""

    left_mean: float
    left_largest: float
    right_mean: float
    right_largest: float


def spectrum(delta: Float[Tensor, "o i"], *, top: int = 16, exact: int = 1024, seed: int = 0) -> Spectrum:
    """The spectrum of a matrix: exact in float64 where its shorter side is at most ``exact``, else randomized.

    Above that size: subspace iteration on ``2 top + 16`` directions in float32 or better, until the residual is below
    1e-3 or for 12 rounds (Halko, Martinsson and Tropp, 2011). Where the values lie close together the residual stays
    larger, while the values, whose error goes with its square, are much better than it.

    Args:
        delta: the matrix, in any floating point type.
        top: directions kept, and whose share of the energy is given.
        exact: longest shorter side of a matrix that is decomposed whole.
        seed: of the directions that the iteration starts from; the global random state is left alone.

    Raises:
        ValueError: the matrix is empty or holds NaN or infinity, or ``top`` is below 1.
    """
    if not delta.numel() or top < 1:
        raise ValueError(f"need a matrix with entries and top >= 1; got shape {list(delta.shape)} and top={top}.")
    energy = sum(float(piece.double().square().sum()) for piece in _pieces(delta))
    if not energy < float("inf"):
        raise ValueError(f"the matrix {list(delta.shape)} holds NaN or infinity, so it has no singular values.")
    whole = min(delta.shape) <= exact
    if not energy > 0:
        return Spectrum(0.0, 0.0, None, None, 0, True, 0.0, None, None)
    left, values, right, error = _decomposed(delta, top) if whole else _leading(delta, top, seed)
    values = values.double()
    kept = values > _NEGLIGIBLE * values[0]
    count = int(kept[:top].sum())
    return Spectrum(
        norm=energy**0.5,
        spectral_norm=float(values[0]),
        stable_rank=energy / float(values[0]) ** 2,
        top_energy=min(float(values[:top].square().sum()) / energy, 1.0),
        numerical_rank=int(kept.sum()) if whole else None,
        exact=whole,
        error=error,
        left=left[:, :count],
        right=right[:, :count],
    )


def unchanged(before: Float[Tensor, "*s"], after: Float[Tensor, "*s"]) -> Unchanged:
    """Shares of unchanged weights, by the definitions of the literature, so that figures can be compared.

    The relative rule with 1e-3 is definition 2.1 of Zhu et al.; on two tensors stored in bfloat16 it means equality,
    since neighbors there differ by 2^-8 of themselves at least. The absolute rule is what the published command of
    Mukherjee et al. asks for (``--torch_dtype bfloat16 --tolerances 1e-5``). Both were confirmed from the command and
    from others' implementations of the papers' definitions, not from the papers' own code, which could not be read.

    Raises:
        ValueError: different shapes, no weights at all, or numbers that are not finite.
    """
    if before.shape != after.shape or not before.numel():
        raise ValueError(f"need weights of one shape; got {list(before.shape)} before and {list(after.shape)} after.")
    sums = torch.zeros(3, dtype=torch.float64)
    for old, new in zip(_pieces(before), _pieces(after), strict=True):
        near = unchanged_share(old, new, absolute=ABSOLUTE)
        shares = unchanged_share(old, new), unchanged_share(old, new, relative=RELATIVE), near
        sums += old.numel() * torch.tensor(shares, dtype=torch.float64)
    return Unchanged(*(sums / before.numel()).tolist())


def principal_overlap(delta_vectors: Float[Tensor, "d k"], base_vectors: Float[Tensor, "d m"]) -> tuple[float, float]:
    """Overlap of an update's leading singular vectors with the weight's own, and what random directions would have.

    ``|Q_1^T Q_2|_F^2 / min(k, m)`` and ``max(k, m) / d``, both in 0..1; on a side no longer than that the null is 1.

    Raises:
        ValueError: vectors of different length, or none.
    """
    size, counts = len(delta_vectors), (delta_vectors.shape[1], base_vectors.shape[1])
    return overlap(delta_vectors, base_vectors), min(max(counts) / size, 1.0)


def rotation(base: Spectrum, tuned: Spectrum) -> Rotation | None:
    """How far a weight's leading singular subspaces have turned, left and right; None where either weight is zero.

    Principal angles between the spans of the leading vectors. Where the spectrum is flat at the last of them the
    subspace is hardly defined, and turns far at a touch: read it beside the error of both spectra.
    """
    if base.left is None or base.right is None or tuned.left is None or tuned.right is None:
        return None
    sides = [principal_angles(base.left, tuned.left), principal_angles(base.right, tuned.right)]
    return Rotation(*(float(figure) for angles in sides for figure in (angles.mean(), angles.max())))


def random_shares(
    delta: Float[Tensor, "o i"], *, output: int, input: int, draws: int = 20, seed: int = 0
) -> Float[Tensor, "n 3"]:
    """Share of a matrix's energy inside random spans: on the output side, on the input side, in both at once.

    What :func:`forklora.measure.captured_share` gives for ``draws`` pairs of random orthonormal bases, in one pass over
    the matrix; on average ``output / o``, ``input / i`` and their product.

    Raises:
        ValueError: the matrix is zero or not finite, or a span has no direction or more than its side.
    """
    rows, columns = delta.shape
    if not (1 <= output <= rows and 1 <= input <= columns):
        raise ValueError(f"spans of {output} and {input} directions do not fit a matrix {list(delta.shape)}.")
    total = sum(float(piece.double().square().sum()) for piece in _pieces(delta))
    if not 0 < total < float("inf"):
        raise ValueError("the matrix is zero or NaN: no share of it lies anywhere.")
    matrix = delta.to(torch.promote_types(delta.dtype, torch.float32))
    generator = torch.Generator().manual_seed(seed)
    left = torch.cat([_random(rows, output, generator) for _ in range(draws)], 1).to(matrix)
    right = torch.cat([_random(columns, input, generator) for _ in range(draws)], 1).to(matrix)
    above, beside = (left.T @ matrix).unflatten(0, (draws, output)), matrix @ right
    both = above @ right.unflatten(1, (draws, input)).movedim(1, 0)
    inside = beside.unflatten(1, (draws, input)).movedim(1, 0)
    return torch.stack([part.double().square().sum((1, 2)) / total for part in (above, inside, both)], 1)


def _random(size: int, count: int, generator: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(size, count, dtype=torch.float64, generator=generator)).Q


def _pieces(values: Tensor) -> Iterator[Tensor]:
    """All numbers in stretches, so that what is made of them in a larger type stays small."""
    flat = values.reshape(-1)
    return (flat[start : start + _PIECE] for start in range(0, len(flat), _PIECE))


def _decomposed(matrix: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, float]:
    """All singular values and the leading vectors in float64: a QR first, which makes the SVD that of a square."""
    tall = matrix.double() if matrix.shape[0] >= matrix.shape[1] else matrix.double().T
    q, r = torch.linalg.qr(tall)
    u, values, vh = torch.linalg.svd(r)
    long, short = q @ u[:, :top], vh[:top].T
    return (long, values, short, 0.0) if matrix.shape[0] >= matrix.shape[1] else (short, values, long, 0.0)


def _leading(matrix: Tensor, top: int, seed: int) -> tuple[Tensor, Tensor, Tensor, float]:
    """The leading triples by subspace iteration, each ``u^T A = s v^T`` by construction, with their residual."""
    a = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    width = min(2 * top + 16, *a.shape)
    start = torch.randn(a.shape[1], width, generator=torch.Generator().manual_seed(seed), dtype=a.dtype)
    image = a @ start.to(a.device)
    left, values, right, error = image, image, image, float("inf")
    for _ in range(_ROUNDS):
        basis = torch.linalg.qr(image).Q
        right, values, mixing = torch.linalg.svd(a.T @ basis, full_matrices=False)
        left, image = basis @ mixing.T, a @ right
        kept = values[:top] > _NEGLIGIBLE * values[0]
        residual = (image - left * values)[:, :top].norm(dim=0) / values[:top]
        error = float(residual[kept].max())
        if error <= _ENOUGH:
            break
    return left[:, :top], values[:top], right[:, :top], error
