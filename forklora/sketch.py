"""Sums outer products into a small additive sketch and reads the leading eigenbasis out of it.

Decisions: the sketch is ``Y = S Omega`` (PSD Nystroem; Tropp, Yurtsever, Udell, Cevher, 2017), so that sums over
batches and ranks are sums of sketches; ``Omega`` depends on size, width and seed only; a width that reaches the size
keeps ``S`` itself. Everything runs in float64: only there can a direction without energy be told from rounding, and the
cost is small beside the backward pass that makes the vectors.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch
from jaxtyping import Float, Float32, Float64
from torch import Tensor, distributed

# An eigenvalue below this share of the largest carries no energy: vectors rounded to float32 turn zeros into 1e-14.
_FLOOR = 1e-10
# The shift that keeps the Cholesky factor real when S has fewer directions than the sketch has columns: far above the
# rounding of float64, far below the floor.
_SHIFT = 1e-12
# Vectors widened to float64 at a time.
_CHUNK = 2048

# Sketches of many layers share one Omega as long as one of them lives; on large models it is as big as the sketches.
_omegas: WeakValueDictionary[tuple[int, int, int, str], Tensor] = WeakValueDictionary()


class Sketch:
    """Additive sketch of ``S = sum_i w_i v_i v_i^T``, size x size, in size x width numbers.

    It lives on the device of the vectors it was last given. Cost of adding n vectors: two products of n x size x width.

    Attributes:
        size: length of the vectors.
        width: columns of ``Omega``; with four times the directions wanted about 1 % of a spectrum like j^-2 is lost.
        seed: of ``Omega``; equal sizes, widths and seeds share it.
        count: number of vectors added.

    Raises:
        ValueError: size or width below 1.
    """

    def __init__(self, size: int, *, width: int, seed: int) -> None:
        if size < 1 or width < 1:
            raise ValueError(f"a sketch needs a size and a width of at least 1; got size={size}, width={width}.")
        self.size, self.width, self.seed = size, width, seed
        self.count = 0
        self._product = torch.zeros(size, min(width, size), dtype=torch.float64)
        self._trace = torch.zeros((), dtype=torch.float64)
        self._omega = None if width >= size else _omega((size, width), seed=seed, device=torch.device("cpu"))

    @property
    def trace(self) -> float:
        """``tr S = sum_i w_i |v_i|^2``, exact: all the energy, whatever the width."""
        return float(self._trace)

    @torch.no_grad()
    def add(self, vectors: Float[Tensor, "n size"], weights: Float[Tensor, " n"] | None = None) -> None:
        """Add ``sum_i w_i v_i v_i^T``; weights of one where none are given.

        Raises:
            ValueError: other shapes, or a weight that is negative or NaN (the sum would not be positive semidefinite).
        """
        if vectors.ndim != 2 or vectors.shape[1] != self.size:
            raise ValueError(f"vectors have shape {list(vectors.shape)}, but the sketch takes [n, {self.size}].")
        if weights is not None and weights.shape != vectors.shape[:1]:
            raise ValueError(f"weights have shape {list(weights.shape)}, but there are {len(vectors)} vectors.")
        if weights is not None and not (weights >= 0).all():
            raise ValueError("weights must not be negative or NaN; the sum of outer products would lose its meaning.")
        self._to(vectors.device)
        for start in range(0, len(vectors), _CHUNK):
            chunk = vectors[start : start + _CHUNK].double()
            weighted = chunk if weights is None else chunk * weights[start : start + _CHUNK, None].double()
            self._product += weighted.T @ (chunk if self._omega is None else chunk @ self._omega)
            self._trace += (weighted * chunk).sum()
        self.count += len(vectors)

    @torch.no_grad()
    def add_rows(self, vectors: Float[Tensor, "b n size"], grams: Float[Tensor, "b n m"]) -> None:
        """Add ``sum_b V_b^T K_b V_b``: vectors of one row that go together, joined by the row's Gram matrix.

        With ``K_b = X_b X_b^T`` this is ``sum_b M_b M_b^T`` for ``M_b = V_b^T X_b``, without ever forming ``M_b``.

        Raises:
            ValueError: other shapes.
        """
        if vectors.ndim != 3 or vectors.shape[2] != self.size or grams.shape != (*vectors.shape[:2], vectors.shape[1]):
            raise ValueError(
                f"vectors {list(vectors.shape)} and Gram matrices {list(grams.shape)}: needed are "
                f"[b, n, {self.size}] and [b, n, n]."
            )
        self._to(vectors.device)
        rows = max(1, _CHUNK // max(1, vectors.shape[1]))
        for start in range(0, len(vectors), rows):
            chunk, gram = vectors[start : start + rows].double(), grams[start : start + rows].double()
            joined = gram @ (chunk if self._omega is None else chunk @ self._omega)
            self._product += chunk.flatten(0, 1).T @ joined.flatten(0, 1)
            self._trace += (gram * (chunk @ chunk.mT)).sum()
        self.count += len(vectors)

    def merge(self, other: Sketch) -> None:
        """Add all that another sketch has seen.

        Raises:
            ValueError: the other sketch has another size, width or seed, so that the sums do not fit together.
        """
        mine, theirs = ((s.size, s.width, s.seed) for s in (self, other))
        if mine != theirs:
            raise ValueError(f"sketches of (size, width, seed) {mine} and {theirs} cannot be merged; make them equal.")
        self._product += other._product.to(self._product.device)
        self._trace += other._trace.to(self._trace.device)
        self.count += other.count

    def all_reduce(self) -> None:
        """Add up the sketches of all ranks, once, at the end; nothing to do where no process group exists.

        Every rank calls this, also one that added nothing: there is one collective and no branch on data.
        """
        if not (distributed.is_available() and distributed.is_initialized()):
            return
        count = self._trace.new_tensor([self.count])
        packed = torch.cat([self._product.flatten(), self._trace.view(1), count]).to(_collective_device())
        distributed.all_reduce(packed)
        self._to(packed.device)
        self._product = packed[:-2].view_as(self._product)
        self._trace, self.count = packed[-2], int(packed[-1])

    def spectrum(self, k: int) -> Float64[Tensor, " n"]:
        """The leading eigenvalues of ``S``, descending, at most ``k`` and at most as many as the sketch has columns."""
        return self._eigen()[0][:k].clamp_min(0)

    def eigenbasis(self, k: int) -> tuple[Float64[Tensor, " k"], Float32[Tensor, "size k"]]:
        """The ``k`` leading eigenvalues of ``S``, descending, and their orthonormal eigenvectors.

        In each vector the entry of largest magnitude is positive. Exact for ``width >= size``; else the eigenpairs of
        the Nystroem approximation ``Y (Omega^T Y)^+ Y^T``, never above those of ``S``. Computed on the CPU, so that
        equal sums give equal bits whatever the device.

        Raises:
            ValueError: nothing was added, something added was not finite, or fewer than ``k`` directions carry energy.
        """
        values, vectors = self._eigen()
        available = self._carrying(values)
        if k < 1 or k > available:
            raise ValueError(
                f"asked for {k} directions, but only {available} carry energy: the sketch has width {self.width} and "
                f"saw {self.count} vectors of length {self.size}."
            )
        values, vectors = values[:k], vectors[:, :k]
        peak = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
        return values, (vectors * peak.sign()).float()

    @property
    def available(self) -> int:
        """Directions that carry energy: as many as :meth:`eigenbasis` can be asked for; 0 where nothing was added.

        Raises:
            ValueError: something added was not finite.
        """
        return self._carrying(self._eigen()[0]) if self._product.any() else 0

    def leading(self, k: int) -> tuple[Float64[Tensor, " n"], Float32[Tensor, "size n"]]:
        """As :meth:`eigenbasis`, but of the directions that carry energy where they are fewer than ``k``; maybe none.

        Raises:
            ValueError: something added was not finite.
        """
        found = min(k, self.available)
        if found < 1:
            return torch.zeros(0, dtype=torch.float64), torch.zeros(self.size, 0)
        return self.eigenbasis(found)

    @staticmethod
    def _carrying(values: Float64[Tensor, " w"]) -> int:
        return int((values > _FLOOR * values[0]).sum())

    def _eigen(self) -> tuple[Float64[Tensor, " w"], Float64[Tensor, "size w"]]:
        product = self._product.cpu()
        if not product.isfinite().all():
            raise ValueError(
                f"the sketch holds NaN or infinity: some of its {self.count} vectors or weights were not finite."
            )
        if not product.any():
            raise ValueError(f"the sketch is zero ({self.count} vectors added): there is no direction to read.")
        if self._omega is None:
            values, vectors = torch.linalg.eigh((product + product.T) / 2)
            return values.flip(0), vectors.flip(1)
        return _nystroem_eigen(product, self._omega.cpu())

    def _to(self, device: torch.device) -> None:
        self._product, self._trace = self._product.to(device), self._trace.to(device)
        if self._omega is not None and self._omega.device != device:
            self._omega = _omega((self.size, self.width), seed=self.seed, device=device)


def _nystroem_eigen(
    product: Float64[Tensor, "size w"], omega: Float64[Tensor, "size w"]
) -> tuple[Float64[Tensor, " w"], Float64[Tensor, "size w"]]:
    """Eigenpairs of ``Y (Omega^T Y)^-1 Y^T`` for ``Y = (S + nu I) Omega``, less the shift ``nu``, descending.

    With ``Omega^T Y = L L^T`` they are the squared singular values and left singular vectors of ``Y L^-T``.
    """
    shift = _SHIFT * product.norm()
    shifted = product + shift * omega
    core = omega.T @ shifted
    lower = torch.linalg.cholesky((core + core.T) / 2)
    factor = torch.linalg.solve_triangular(lower, shifted.T, upper=False).T
    vectors, singular, _ = torch.linalg.svd(factor, full_matrices=False)
    return singular.square() - shift, vectors


def _omega(shape: tuple[int, int], *, seed: int, device: torch.device) -> Float64[Tensor, "size width"]:
    """Orthonormal basis of the columns of a Gaussian matrix: same range, so same sketch, but never ill conditioned."""
    key = (*shape, seed, str(device))
    found = _omegas.get(key)
    if found is None:
        generator = torch.Generator("cpu").manual_seed(seed)
        gaussian = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        found = _omegas[key] = torch.linalg.qr(gaussian).Q.to(device)
    return found


def _collective_device() -> torch.device:
    """Where the process group adds: gloo and MPI on the CPU, every other backend on this process's accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or distributed.get_backend() in ("gloo", "mpi"):
        return torch.device("cpu")
    return accelerator
