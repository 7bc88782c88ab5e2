"""Share of a held-out policy gradient's energy that reward-free bases hold, beside other bases of the same size.

Decisions: bases come from training prompts without any reward, the gradient from held-out prompts with the task's own
reward, centered per group; its own singular vectors are the most that any basis of a size can hold; shares are averaged
over the layers of a type, every layer counting the same; the random null is measured, not computed.

    forklora capture quickstart
"""

from typing import Any

import torch
from forklora.recipes.config import Recipe
from forklora.recipes.demo import load_model
from forklora.recipes.depth import layer_type
from forklora.recipes.evaluate import Examiner
from forklora.recipes.refusal import Refusal
from torch import Tensor, nn
from tqdm.auto import tqdm

from forklora.backward import WeightGradients, backward, layer_shape, linear_layers, listening, residual_writers
from forklora.bases import BasisConfig, collect_bases, encode, identity_span, seeded
from forklora.measure import captured_share
from forklora.rollouts import sample
from forklora.sketch import Sketch
from forklora.spectra import spectrum
from forklora.unembed import read_unembedding

_RANKS = (1, 4, 16)
_SEED = 30_000  # of the held-out rollouts
_EXACT = 256  # longest shorter side that is decomposed exactly: sixteen directions of a larger one are found well

_NAMES = [f"{side} k={k}" for side in ("out", "in") for k in _RANKS] + [f"block {k}x{k}" for k in _RANKS]
Sides = tuple[Tensor | None, Tensor | None]
_CARRIED, _SPAN, _RANDOM = "carried span", "span itself", "random"
_SINGULAR, _INPUTS, _OWN = "largest singular vectors of the weight", "principal inputs", "the gradient's own"


def run_capture(recipe: Recipe) -> dict[str, Any]:
    """Measure a recipe's model and task.

    Returns:
        ``rows``, shares inside the carried span by type of layer; ``bases``, those of every basis, all layers;
        ``energy``, where the gradient's energy lies, by type; ``layers``, every figure of every layer.

    Raises:
        Refusal: no reward differs within a group, so that there is no gradient.
    """
    model, tokenizer = load_model(recipe.model.name, recipe.model.dtype)
    task = recipe.task.build()
    examiner = Examiner(recipe, task, tokenizer=tokenizer)
    questions = task.examples(recipe.forks.prompts, seed=recipe.seed, split="train")
    config = BasisConfig(output=max(_RANKS), input=max(_RANKS), group=recipe.group, seed=recipe.forks.seed)
    prompts = [encode(tokenizer, e.prompt) for e in questions]
    bases = collect_bases(model, tokenizer, prompts, config=config, sampler=examiner.sampler)
    inputs = principal_inputs(recipe, model, prompts=prompts, examiner=examiner)
    gradients, identity = held_out_gradients(recipe, model, examiner=examiner)
    if not any(gradient.any() for gradient in gradients.values()):
        raise Refusal(
            f"the rewards of {recipe.task.name} differ in no group of held-out completions, so there is no gradient; "
            "take more prompts (evaluation.prompts=...), larger groups (group=...) or an easier task (task.options=...)"
        )
    modules = dict(model.named_modules())
    layers = []
    for name in tqdm([n for n in bases if n in gradients], desc="shares", unit="layer", leave=False):
        found: dict[str, Sides] = {
            _CARRIED: (bases[name].output, bases[name].input),
            _SPAN: (identity.get(name), None),
            _INPUTS: (None, inputs[name]),
            _SINGULAR: _leading(_weight(modules[name])),
            _RANDOM: _random(*layer_shape(modules[name]), seed=len(layers)),
            _OWN: _leading(gradients[name]),
        }
        shares = {basis: _shares(gradients[name], *sides) for basis, sides in found.items()}
        layers.append({"layer": name, "energy": float(gradients[name].square().sum()), "shares": shares})
    last = residual_writers(model, read_unembedding(model, check=False).width)[-1]
    rows = _by_type(layers) + [_row(f"last writer: {last}", [e for e in layers if e["layer"] == last], _CARRIED)]
    every = [{"basis": basis, **_means(layers, basis)} for basis in layers[0]["shares"]]
    return {"rows": rows, "bases": every, "energy": _energies(layers), "layers": layers, "facts": bases.facts}


def principal_inputs(
    recipe: Recipe, model: nn.Module, *, prompts: list[list[int]], examiner: Examiner
) -> dict[str, Tensor]:
    """Leading directions of ``sum x x^T`` at every linear layer, on the policy's own completions, as in EVA."""
    sketches: dict[str, Sketch] = {}
    modules = {name: module for name, module in model.named_modules() if name in set(linear_layers(model))}

    def _add(name: str, x: Tensor, _: Tensor) -> None:
        if name not in sketches:
            sketches[name] = Sketch(x.shape[-1], width=min(4 * max(_RANKS), x.shape[-1]), seed=recipe.forks.seed)
        sketches[name].add(x.flatten(0, -2).float())

    head, step = read_unembedding(model), recipe.prompts
    with seeded(recipe.forks.seed):
        for i in tqdm(range(0, len(prompts), step), desc="inputs", unit="batch", leave=False):
            trace = sample(model, prompts[i : i + step], sampler=examiner.sampler, group=1, unembedding=head)
            with listening(modules, _add):
                backward(model, trace, advantages=torch.ones(len(trace)))
    return {name: sketch.eigenbasis(max(_RANKS))[1] for name, sketch in sketches.items()}


def held_out_gradients(
    recipe: Recipe, model: nn.Module, *, examiner: Examiner
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Rewarded policy gradient of every linear layer on held-out rollouts, and the model's identity-path span."""
    sums, head, traces = WeightGradients(model, linear_layers(model)), read_unembedding(model), []
    step = recipe.prompts
    with seeded(_SEED):
        for i in tqdm(range(0, len(examiner.prompts), step), desc="held-out gradient", unit="batch", leave=False):
            prompts = examiner.prompts[i : i + step]
            trace = sample(model, prompts, sampler=examiner.sampler, group=recipe.group, unembedding=head)
            reward = torch.tensor(examiner.rewards(trace, first=i, samples=recipe.group)).view(-1, recipe.group)
            sums.add(model, trace, advantages=(reward - reward.mean(1, keepdim=True)).flatten())
            traces.append(trace)
    return sums.sums, identity_span(model, traces[:2], output=max(_RANKS))


def _shares(gradient: Tensor, u: Tensor | None, q: Tensor | None) -> dict[str, float | None]:
    """Shares inside the leading directions of each side, and of both; None where a basis has no such side."""
    found: dict[str, float | None] = dict.fromkeys(_NAMES)
    for k in _RANKS:
        if u is not None:
            found[f"out k={k}"] = captured_share(gradient, output=u[:, :k])
        if q is not None:
            found[f"in k={k}"] = captured_share(gradient, input=q[:, :k])
        if u is not None and q is not None:
            found[f"block {k}x{k}"] = captured_share(gradient, output=u[:, :k], input=q[:, :k])
    return found


def _weight(module: Any) -> Tensor:  # noqa: ANN401 - a linear layer of any library
    weight = module.weight.detach().float()
    return weight.T if type(module).__name__ == "Conv1D" else weight


def _leading(matrix: Tensor) -> Sides:
    """Leading singular vectors on both sides."""
    found = spectrum(matrix, top=max(_RANKS), exact=_EXACT)
    if found.left is None or found.right is None:
        return None, None
    return found.left.to(matrix.dtype), found.right.to(matrix.dtype)


def _random(d_out: int, d_in: int, *, seed: int) -> tuple[Tensor, Tensor]:
    with seeded(seed):
        u, q = (torch.linalg.qr(torch.randn(d, max(_RANKS))).Q for d in (d_out, d_in))
    return u, q


def _by_type(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kinds = dict.fromkeys(layer_type(entry["layer"]) for entry in layers)
    rows = [_row(kind, [e for e in layers if layer_type(e["layer"]) == kind], _CARRIED) for kind in kinds]
    return [*rows, _row("all layers", layers, _CARRIED), _row("all layers, random bases", layers, _RANDOM)]


def _row(title: str, layers: list[dict[str, Any]], basis: str) -> dict[str, Any]:
    return {"layers": title, **_means(layers, basis)}


def _means(layers: list[dict[str, Any]], basis: str) -> dict[str, float | None]:
    """Mean share over the layers that have such a basis; None where none has."""
    found: dict[str, float | None] = {}
    for name in _NAMES:
        known = [entry["shares"][basis][name] for entry in layers if entry["shares"][basis][name] is not None]
        found[name] = sum(known) / len(known) if known else None
    return found


def _energies(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Share of the gradient's energy in each type of layer."""
    total = sum(entry["energy"] for entry in layers)
    kinds = dict.fromkeys(layer_type(entry["layer"]) for entry in layers)
    groups = {kind: [e["energy"] for e in layers if layer_type(e["layer"]) == kind] for kind in kinds}
    return [
        {"layers": kind, "count": len(found), "share": sum(found) / total if total > 0 else None}
        for kind, found in groups.items()
    ]
