"""Measures what an update has done to a model's weights, matrix by matrix, and where it lies.

Decisions: a matrix is any weight of two dimensions, the embedding among them; weights of one dimension have shares of
unchanged numbers and no spectrum; figures of spectra are summed up by their median over the matrices that moved, as in
the literature, shares of unchanged weights by the number of weights; an interval is that of the mean over layers, from
resampled layers.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from forklora.recipes.depth import layer_type
from forklora.recipes.pairs import Pair, WeightPairs
from forklora.recipes.spans import Spans
from torch import Tensor
from tqdm.auto import tqdm

from forklora.measure import captured_share
from forklora.spectra import Spectrum, principal_overlap, random_shares, rotation, spectrum, unchanged

_DRAWS = 20  # of random spans for a layer
_RESAMPLED = 1000
_SHARES = ("output", "input", "both")


def measure_update(
    pairs: WeightPairs, *, top: int = 16, exact: int = 1024, seed: int = 0, spans: Spans | None = None
) -> dict[str, Any]:
    """Everything that is measured, ready for JSON.

    Args:
        pairs: weights before and after.
        top: singular values whose share of the energy is given, and directions that are compared.
        exact: longest shorter side of a matrix that is decomposed exactly.
        seed: of randomized decompositions, random spans and resampling.
        spans: bases of the base model's forks; then the share of the update's energy inside them is given, too.

    Returns:
        ``matrices`` and ``vectors``, an entry for each weight; ``rows``, their sums by type of layer and in total;
        ``captured``, shares of the update's energy inside the spans, beside random ones; ``only_base``,
        ``only_tuned``, names that stand on one side alone.

    Raises:
        Refusal: a weight that cannot be read, or is not finite.
    """
    matrices, vectors = [], []
    settings = {"top": top, "exact": exact, "seed": seed}
    for pair in tqdm(pairs, total=len(pairs), desc="weights", unit="weight", leave=False):
        before, after = pair.before(), pair.after()
        shares = {f"unchanged_{rule}": share for rule, share in asdict(unchanged(before, after)).items()}
        entry = {"name": pair.name, "shape": list(before.shape), "numbers": before.numel(), **shares}
        flat = before.ndim != 2  # noqa: PLR2004 - a matrix
        del before, after
        if flat:
            vectors.append(entry)
            continue
        delta = pair.delta()
        moved = spectrum(delta, **settings)
        inside = _inside(pair.name, delta, spans=spans, seed=seed) if spans is not None and moved.norm > 0 else None
        del delta
        matrices.append(entry | _figures(moved) | _against(pair, moved, settings) | {"captured": inside})
    found = {"matrices": matrices, "vectors": vectors, "rows": _rows(matrices, vectors)}
    found["captured"] = [] if spans is None else _captured(matrices, seed=seed)
    return found | {"only_base": pairs.only_base, "only_tuned": pairs.only_tuned}


def _figures(found: Spectrum) -> dict[str, Any]:
    kept = ("norm", "spectral_norm", "stable_rank", "top_energy", "numerical_rank", "exact", "error")
    return {key: getattr(found, key) for key in kept}


def _against(pair: Pair, moved: Spectrum, settings: dict[str, int]) -> dict[str, Any]:
    """The update's leading directions beside the weight's own, and how far these have turned."""
    if moved.left is None or moved.right is None:
        return {"principal_left": None, "principal_right": None, "rotation": None}
    base, tuned = spectrum(pair.before(), **settings), spectrum(pair.after(), **settings)
    sides = ((moved.left, base.left), (moved.right, base.right))
    overlaps = [None if own is None else principal_overlap(mine, own) for mine, own in sides]
    named = [None if one is None else {"overlap": one[0], "random": one[1]} for one in overlaps]
    turned = rotation(base, tuned)
    worst = {"weights_error": max(base.error, tuned.error)}
    angles = None if turned is None else asdict(turned)
    return {"principal_left": named[0], "principal_right": named[1], "rotation": angles, **worst}


def _inside(name: str, delta: Tensor, *, spans: Spans, seed: int) -> dict[str, Any] | None:
    """Share of an update's energy in the bases of its layer, beside random spans of as many directions."""
    layer = name.removesuffix(".weight")
    basis = spans.bases.get(layer)
    if basis is None or not basis.output.numel() or not basis.input.numel():
        return None
    turned = delta.T if layer in spans.transposed else delta
    u, q = basis.output.to(turned.dtype), basis.input.to(turned.dtype)
    found: dict[str, Any] = {
        "output": captured_share(turned, output=u),
        "input": captured_share(turned, input=q),
        "both": captured_share(turned, output=u, input=q),
    }
    span = spans.identity.get(layer)
    found["span"] = None if span is None else captured_share(turned, output=span.to(turned.dtype))
    null = random_shares(turned, output=u.shape[1], input=q.shape[1], draws=_DRAWS, seed=seed)
    for i, side in enumerate(_SHARES):
        low, high = null[:, i].quantile(torch.tensor([0.025, 0.975], dtype=null.dtype)).tolist()
        found[f"random_{side}"] = {"mean": float(null[:, i].mean()), "low": low, "high": high}
    return found


def _rows(matrices: Sequence[dict[str, Any]], vectors: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    kinds = dict.fromkeys(layer_type(entry["name"]) for entry in matrices)
    groups = {kind: [e for e in matrices if layer_type(e["name"]) == kind] for kind in kinds}
    groups |= {"all matrices": list(matrices)} if len(kinds) > 1 else {}
    rows = [_row(title, group) for title, group in groups.items()]
    return rows + ([_row("norms and biases", vectors)] if vectors else [])


def _row(title: str, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    numbers = sum(entry["numbers"] for entry in entries)
    row: dict[str, Any] = {"weights": title, "count": len(entries), "numbers": numbers}
    for rule in ("bf16", "relative", "absolute"):
        key = f"unchanged_{rule}"
        row[key] = sum(entry[key] * entry["numbers"] for entry in entries) / numbers
    moved = [entry for entry in entries if entry.get("norm")]
    row["moved"] = len(moved) if all("norm" in entry for entry in entries) else None
    row["norm"] = sum(entry["norm"] ** 2 for entry in moved) ** 0.5 if row["moved"] is not None else None
    for key in ("numerical_rank", "stable_rank", "top_energy", "error"):
        row[key] = _median([entry[key] for entry in moved])
    row["full_rank"] = _median([_of_full(entry) for entry in moved])
    for side in ("left", "right"):
        pairs = [entry[f"principal_{side}"] for entry in moved if entry[f"principal_{side}"]]
        row[f"principal_{side}"] = _median([pair["overlap"] for pair in pairs])
        row[f"principal_{side}_random"] = _median([pair["random"] for pair in pairs])
    row["rotation"] = _median([e["rotation"]["left_mean"] for e in moved if e["rotation"]])
    return row


def _of_full(entry: dict[str, Any]) -> float | None:
    rank = entry["numerical_rank"]
    return None if rank is None else rank / min(entry["shape"])


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known and len(known) == len(values) else None


def _captured(matrices: Sequence[dict[str, Any]], *, seed: int) -> list[dict[str, Any]]:
    entries = [(layer_type(entry["name"]), entry["captured"]) for entry in matrices if entry["captured"]]
    kinds = dict.fromkeys(kind for kind, _ in entries)
    groups = {kind: [found for of, found in entries if of == kind] for kind in kinds}
    groups |= {"all layers": [found for _, found in entries]} if len(kinds) > 1 else {}
    return [_captured_row(title, group, seed=seed) for title, group in groups.items()]


def _captured_row(title: str, group: Sequence[dict[str, Any]], *, seed: int) -> dict[str, Any]:
    row: dict[str, Any] = {"layers": title, "count": len(group)}
    for side in _SHARES:
        row[side] = _interval([found[side] for found in group], seed=seed)
        row[f"random_{side}"] = sum(found[f"random_{side}"]["mean"] for found in group) / len(group)
    spans = [found["span"] for found in group if found["span"] is not None]
    row["span"] = _interval(spans, seed=seed) if spans else None
    return row


def _interval(values: Sequence[float], *, seed: int) -> dict[str, float]:
    """The mean with the 95 % interval of means over resampled values (percentile bootstrap)."""
    known = torch.tensor(values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    drawn = known[torch.randint(len(known), (_RESAMPLED, len(known)), generator=generator)].mean(1)
    low, high = drawn.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return {"mean": float(known.mean()), "low": low, "high": high}
