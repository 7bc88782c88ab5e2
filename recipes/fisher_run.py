"""Sums up a policy's Fisher without rewards and its gradient with them, and holds one against the other.

Decisions: the prompts are halved, one by one, so that the Fisher of one half can be held against the gradient of the
other, whose completions it has not seen; rewards are centered per group; a layer's factors are those of both halves.
"""

from dataclasses import asdict
from typing import Any

import torch
from forklora.recipes.depth import layer_type
from forklora.recipes.opening import Opened, opened
from forklora.recipes.spans import rollouts
from forklora.recipes.subject import FisherSubject
from jaxtyping import Float, Int64
from torch import Tensor
from tqdm.auto import tqdm

from forklora.backward import linear_layers
from forklora.fisher import Cap, FisherSums, fisher_cap, kronecker_cap, membership, top_coordinates
from forklora.trace import Trace

_CAPS = ("same", "other")
Coordinates = dict[str, Int64[Tensor, " n"]]


def run_fisher(subject: FisherSubject) -> tuple[dict[str, Any], Coordinates]:
    """What is found, ready for JSON, and the largest coordinates of the Fisher: flat indices of each layer's weight.

    Returns:
        ``figures`` of all layers together; ``rows``, by type of layer; ``layers``, one by one; ``factored``, the K-FAC
        cap of a few; each cap with the coordinates that break it. And the coordinates.
    """
    found = opened(subject)
    names = linear_layers(found.model)
    chosen = names[:: max(1, len(names) // subject.factored)][: subject.factored] if subject.factored else []
    halves = [FisherSums(found.model, names, factored=chosen) for _ in range(2)]
    place = 0
    with tqdm(total=subject.group * len(found.prompts), desc="Fisher", unit="rollout", leave=False) as bar:
        for trace in rollouts(found, subject):
            advantages = _advantages(found, trace, first=place, group=subject.group)
            for i in range(0, len(trace), subject.group):
                rows = list(range(i, i + subject.group))
                halves[(place + i // subject.group) % 2].add(
                    found.model, trace.select(rows), advantages=advantages[rows]
                )
                bar.update(subject.group)
            place += len(trace) // subject.group
    return _held_against(subject, halves, chosen=chosen)


def _advantages(found: Opened, trace: Trace, *, first: int, group: int) -> Float[Tensor, " n"]:
    reward = found.rewards(trace, first=first, samples=group).float().view(-1, group)
    return (reward - reward.mean(1, keepdim=True)).flatten()


def _held_against(
    subject: FisherSubject, halves: list[FisherSums], *, chosen: list[str]
) -> tuple[dict[str, Any], Coordinates]:
    first, second = halves
    layers = [_layer(name, first, second) for name in first.layers if name in second.layers]
    names = [entry["layer"] for entry in layers]
    share = subject.share
    fisher = [top_coordinates({name: half.fisher(name) for name in names}, share=share) for half in halves]
    gradient = [top_coordinates({name: half.gradient(name).abs() for name in names}, share=share) for half in halves]
    for entry in layers:
        entry["top_fisher"], entry["top_gradient"] = (len(kept[0][entry["layer"]]) for kept in (fisher, gradient))
    moved = any(entry["gradient_energy"] > 0 for entry in layers)
    figures = {
        "rollouts": sum(half.count for half in halves),
        "positions": sum(half.length * half.count for half in halves),
        "coordinates": sum(entry["numbers"] for entry in layers),
        "deviation": second.deviation,
        "share": share,
        "held_same": membership(gradient[0], fisher[0]) if moved else None,
        "held_other": membership(gradient[1], fisher[0]) if moved else None,
        "fisher_kept": membership(fisher[0], fisher[1]),
        "gradient_kept": membership(gradient[0], gradient[1]) if moved else None,
        "numbers_that_hold_half_the_fisher": _concentration(first, names),
    }
    kinds = dict.fromkeys(layer_type(name) for name in names)
    rows = [_row(kind, [e for e in layers if layer_type(e["layer"]) == kind], layers) for kind in kinds]
    factored = [_factored(name, first, second) for name in chosen if name in names]
    result = {
        "subject": subject.model_dump(mode="json"),
        "figures": figures,
        "rows": [*rows, _row("all", layers, layers)],
    }
    return result | {"layers": layers, "factored": factored}, fisher[0]


def _layer(name: str, first: FisherSums, second: FisherSums) -> dict[str, Any]:
    fisher, gradient = first.fisher(name), second.gradient(name)
    same = fisher_cap(first.gradient(name), fisher, deviation=first.deviation)
    other = fisher_cap(gradient, fisher, deviation=second.deviation)
    return {
        "layer": name,
        "numbers": fisher.numel(),
        "fisher": float(fisher.double().sum()),
        "gradient_energy": float(gradient.double().square().sum()),
        "same": asdict(same),
        "other": asdict(other),
    }


def _concentration(sums: FisherSums, names: list[str]) -> float:
    """Smallest share of the coordinates that holds half of the Fisher, to a thousandth of a decade."""
    edges = torch.linspace(-30, 10, 40_001, dtype=torch.float64)
    counts, energies = torch.zeros(len(edges) + 1), torch.zeros(len(edges) + 1, dtype=torch.float64)
    for name in names:
        values = sums.fisher(name).flatten().double()
        place = torch.bucketize(values.clamp_min(1e-30).log10(), edges)
        counts += torch.bincount(place, minlength=len(counts))
        energies.index_add_(0, place, values)
    held = energies.flip(0).cumsum(0)
    needed = int((held < held[-1] / 2).sum()) + 1
    return float(counts.double().flip(0)[:needed].sum() / counts.double().sum())


def _row(title: str, entries: list[dict[str, Any]], every: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"layers": title, "count": len(entries)}
    for key in ("numbers", "fisher", "gradient_energy", "top_fisher", "top_gradient"):
        total = sum(entry[key] for entry in every)
        row[f"{key}_share"] = sum(entry[key] for entry in entries) / total if total else None
    numbers = sum(entry["numbers"] for entry in entries)
    for cap in _CAPS:
        row[f"{cap}_broken"] = sum(entry[cap]["broken"] for entry in entries) / numbers
        known = [entry[cap] for entry in entries if entry[cap]["tightness"] is not None]
        weight = sum(found["numbers"] for found in known)
        row[f"{cap}_tightness"] = sum(f["tightness"] * f["numbers"] for f in known) / weight if weight else None
    return row


def _factored(name: str, first: FisherSums, second: FisherSums) -> dict[str, Any]:
    """The K-FAC cap on the gradient of all completions."""
    counts = (first.count, second.count)
    total = sum(counts)
    gradient = (first.gradient(name) * counts[0] + second.gradient(name) * counts[1]) / total
    weights = [half.length * half.count for half in (first, second)]
    pairs = zip(first.factors(name), second.factors(name), strict=True)
    output, input_ = ((a * weights[0] + b * weights[1]) / sum(weights) for a, b in pairs)
    deviation = ((first.deviation**2 * counts[0] + second.deviation**2 * counts[1]) / total) ** 0.5
    cap: Cap = kronecker_cap(gradient, (output, input_), deviation=deviation, length=sum(weights) / total)
    return {"layer": name, **asdict(cap)}
