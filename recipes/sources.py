"""Finds the bases that an arm starts from: forks of a task, random ones, or the weights' own singular vectors.

Decisions: bases depend on what they are read from alone, and not on the arm: 16 directions a side of every linear
layer, or more where an arm needs more; so runs of one folder share them, and each still counts the seconds and the
rollouts that they cost once. Where fewer directions carry energy than an arm has, random ones orthogonal to them stand.
Rank 0 alone looks for kept bases, and writes them: ranks that disagreed about it would wait for each other for ever.
"""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from forklora.recipes.config import Recipe
from forklora.recipes.controls import control
from forklora.recipes.evaluate import sampler_of
from forklora.recipes.options import FORK_KINDS, Arm
from forklora.recipes.provenance import hash_tensors
from torch import Tensor, nn

from forklora.adapter import ForkLoraConfig
from forklora.backward import layer_shape, linear_layers
from forklora.bases import Bases, BasisConfig, LayerBasis, collect_bases, encode
from forklora.collective import from_first, rank, ranks
from forklora.drawing import generator_of
from forklora.gathering import whole
from forklora.targets import target_layers

_SIDE = 16  # directions kept on each side


@dataclass(frozen=True)
class Sourced:
    """Bases, and what they cost.

    Attributes:
        bases: of every layer that gets an adapter, with as many directions as it needs.
        seconds: that finding them took, in whatever run it was done.
        rollouts: that they were read from.
    """

    bases: Bases
    seconds: float
    rollouts: int


def arm_bases(recipe: Recipe, arm: Arm, *, model: nn.Module, tokenizer: Any) -> Sourced | None:  # noqa: ANN401
    """The bases of an arm's adapter; None where it has none. Every rank has to call this.

    Args:
        recipe: task, sampling and forks, where the arm does not state its own.
        arm: kind, width and basis.
        model: the base model, as it came.
        tokenizer: of the model.

    Raises:
        ValueError: no forks, or more layers asked for than there are.
    """
    if arm.adapter not in FORK_KINDS:
        return None
    config = _needs(arm)
    wanted = target_layers(model, config)
    size = (config.output_width, config.input_width)
    side = max(_SIDE, *size)
    found = _found(recipe, arm, model=model, tokenizer=tokenizer, side=side)
    read, names = [found], wanted
    if arm.layers is not None:
        if arm.basis != "forks":  # which layers is still a matter of forks
            forked = arm.model_copy(update={"basis": "forks"})
            read.append(_found(recipe, forked, model=model, tokenizer=tokenizer, side=side))
        names = strongest(read[-1], wanted, count=arm.layers, size=size)
    ready = {name: completed(found[name], size, key=f"{recipe.seed}/{name}") for name in names}
    bases = Bases(ready, found.facts, found.spectrum)
    seconds = sum(float(one.facts["seconds"]) for one in read)
    return Sourced(bases, seconds, sum(int(one.facts.get("rollouts", 0)) for one in read))


def _found(recipe: Recipe, arm: Arm, *, model: nn.Module, tokenizer: Any, side: int) -> Bases:  # noqa: ANN401
    """Bases of all layers, from where the arm says, kept or found anew."""
    find: Callable[[], Bases]
    if arm.basis == "forks":
        facts = _fork_facts(recipe, arm)
        find = lambda: _of_forks(recipe, arm, model=model, tokenizer=tokenizer, side=side)  # noqa: E731
    else:
        facts = {"basis": arm.basis, "model": recipe.model.model_dump(mode="json")}
        facts |= {"seed": recipe.seed} if arm.basis == "random" else {}
        find = lambda: _of_weights(model, arm.basis, side=side, seed=recipe.seed)  # noqa: E731
    folder = (arm.forks or recipe.forks).kept_in
    weights = "" if folder is None else hash_tensors(model)  # a folder may hold another model by now
    return _kept(folder, facts | {"side": side, "weights": weights}, find)


def _needs(arm: Arm) -> ForkLoraConfig:
    targets = arm.targets if isinstance(arm.targets, str) else list(arm.targets)
    return ForkLoraConfig(kind=arm.adapter, r=arm.rank, width=arm.width, target_modules=targets)


def _fork_facts(recipe: Recipe, arm: Arm) -> dict[str, Any]:
    """Everything that bases of forks depend on."""
    forks = arm.forks or recipe.forks
    return {
        "model": recipe.model.model_dump(mode="json"),
        "task": (forks.task or recipe.task).model_dump(mode="json"),
        "sampling": recipe.sampling.model_dump(mode="json"),
        "group": recipe.group,
        "forks": forks.model_dump(mode="json", exclude={"kept_in", "task"}),
    }


def _kept(folder: str | None, facts: dict[str, Any], find: Callable[[], Bases]) -> Bases:
    """The bases with these facts, the same on every rank: from the folder where they are there, else found and kept."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    file = None if folder is None else Path(folder) / f"{digest}.safetensors"
    kept = from_first(lambda: None if file is None or not file.exists() else _read(file))
    if kept is not None:
        return kept
    start = time.perf_counter()
    found = find()
    seconds = f"{time.perf_counter() - start:.3f}"

    def keep() -> str:
        if file is not None:
            replace(found, facts={**found.facts, "seconds": seconds}).save(file)
        return seconds

    return replace(found, facts={**found.facts, "seconds": from_first(keep)})


@lru_cache(maxsize=2)
def _read(file: Path) -> Bases:
    return Bases.load(file)


def _of_forks(recipe: Recipe, arm: Arm, *, model: nn.Module, tokenizer: Any, side: int) -> Bases:  # noqa: ANN401
    forks = arm.forks or recipe.forks
    questions = (forks.task or recipe.task).build().examples(forks.prompts, seed=forks.seed, split="train")
    ids = [encode(tokenizer, question.prompt) for question in questions]
    config = BasisConfig(
        output=side, input=side, group=recipe.group, seed=forks.seed, layers=tuple(linear_layers(model)), fewer=True
    )
    sampler = sampler_of(recipe.sampling, tokenizer)
    change = control(forks.signal, seed=forks.seed)
    return collect_bases(model, tokenizer, ids[rank() :: ranks()], config=config, sampler=sampler, change=change)


def _of_weights(model: nn.Module, basis: str, *, side: int, seed: int) -> Bases:
    """Random orthonormal bases, or singular vectors of each weight: the largest first, or the smallest first."""
    modules: dict[str, Any] = dict(model.named_modules())
    layers = {}
    for name in linear_layers(model):
        d_out, d_in = layer_shape(modules[name])
        k, m = min(side, d_out), min(side, d_in)
        if basis == "random":
            u, q = (_random(d, n, key=f"{seed}/{name}/{d}/{s}") for d, n, s in ((d_out, k, "out"), (d_in, m, "in")))
        else:
            with whole(modules[name].weight):
                u, q = singular_vectors(_matrix(modules[name]), count=min(k, m), smallest=basis == "minor")
        layers[name] = LayerBasis(u, _zeros(u), q, _zeros(q), 0.0, 0.0)
    return Bases(layers)


def _zeros(side: Tensor) -> Tensor:
    """Eigenvalues of directions in which no energy was seen."""
    return torch.zeros(side.shape[1], dtype=torch.float64)


def _matrix(module: Any) -> Tensor:  # noqa: ANN401 - a linear layer
    """``W [d_out, d_in]``, also of GPT-2's transposed layers."""
    weight = module.weight.detach()
    return weight.T if type(module).__name__ == "Conv1D" else weight


def singular_vectors(weight: Tensor, *, count: int, smallest: bool = False) -> tuple[Tensor, Tensor]:
    """``count`` left ``[d_out, n]`` and right ``[d_in, n]`` singular vectors, of the largest or smallest values first.

    They are read off the Gram matrix of the smaller side, in float64: exact enough for a matrix whose singular values
    span less than seven orders of magnitude. Where values are zero the vectors are orthogonal to all others. There are
    at most ``min(d_out, d_in)``.
    """
    tall = weight.double() if weight.shape[0] >= weight.shape[1] else weight.double().T
    _, vectors = torch.linalg.eigh(tall.T @ tall)  # ascending
    small = vectors.flip(1)
    # largest first: what rounding leaves of a zero value must not displace a true direction
    large, triangle = torch.linalg.qr(tall @ small)
    large = torch.where(triangle.diagonal() < 0, -large, large)  # qr leaves the signs open
    if smallest:
        small, large = small.flip(1), large.flip(1)
    left, right = (large, small) if tall.shape == weight.shape else (small, large)
    return left[:, :count].float().cpu().contiguous(), right[:, :count].float().cpu().contiguous()


def _random(size: int, count: int, *, key: str) -> Tensor:
    """``count`` random orthonormal columns of length ``size``."""
    return torch.linalg.qr(torch.randn(size, count, generator=generator_of(key))).Q


def strongest(bases: Bases, names: list[str], *, count: int, size: tuple[int, int]) -> list[str]:
    """The ``count`` layers whose blocks of ``size`` directions hold most of the policy gradient's energy, in order.

    A layer's energy is ``trace(S)``, the second moment of its gradient, times the share of it on either side's leading
    directions; a side that a kind leaves free counts whole.

    Raises:
        ValueError: there are fewer layers.
    """
    if count > len(names):
        raise ValueError(f"layers={count}, and only {len(names)} layers get an adapter.")

    def energy(name: str) -> float:
        basis = bases[name]
        sides = ((basis.output_values, basis.output_trace), (basis.input_values, basis.input_trace))
        found = basis.output_trace
        for (values, trace), kept in zip(sides, size, strict=True):
            found *= float(values[:kept].sum()) / trace if kept and trace else 1.0
        return found

    chosen = set(sorted(names, key=energy, reverse=True)[:count])
    return [name for name in names if name in chosen]


def completed(basis: LayerBasis, size: tuple[int, int], *, key: str) -> LayerBasis:
    """The leading ``size`` directions of each side; random ones, orthogonal to the others, where there are too few.

    A side that a kind leaves free (size 0) keeps one.
    """
    sides: list[tuple[Tensor, Tensor]] = []
    parts = (("output", basis.output, basis.output_values), ("input", basis.input, basis.input_values))
    for (name, side, values), wanted in zip(parts, size, strict=True):
        count = max(wanted, 1)
        more = torch.randn(len(side), max(0, count - side.shape[1]), generator=generator_of(f"{key}/{name}/{count}"))
        added = torch.linalg.qr(torch.cat([side, more], 1)).Q[:, side.shape[1] :]
        sides.append((torch.cat([side[:, :count], added], 1), torch.cat([values[:count], _zeros(added)])))
    return LayerBasis(*sides[0], *sides[1], basis.output_trace, basis.input_trace)
