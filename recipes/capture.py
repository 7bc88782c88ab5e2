"""Share of a held-out policy gradient's energy that reward-free bases hold, beside random bases of the same size.

Decisions: the bases come from training prompts without any reward, the gradient from held-out prompts with the task's
own reward, centered per group; shares are averaged over the layers of a type, every layer counting the same; the
random null is measured, not computed.

    forklora capture quickstart
"""

from typing import Any

import torch
from forklora.recipes.config import Recipe
from forklora.recipes.demo import load_model
from forklora.recipes.evaluate import Examiner
from torch import Tensor, nn
from tqdm.auto import tqdm

from forklora.backward import WeightGradients, layer_shape, linear_layers, residual_writers
from forklora.bases import BasisConfig, collect_bases, encode, identity_span, seeded
from forklora.measure import captured_share
from forklora.rollouts import sample
from forklora.unembed import read_unembedding

_RANKS = (1, 4, 16)
_SEED = 30_000  # of the held-out rollouts

_NAMES = [f"{side} k={k}" for side in ("out", "in") for k in _RANKS] + [f"block {k}x{k}" for k in _RANKS]


def run_capture(recipe: Recipe) -> dict[str, Any]:
    """Measure a recipe's model and task: ``rows`` of the table by layer type, and ``layers`` with every figure."""
    model, tokenizer = load_model(recipe.model.name, recipe.model.dtype)
    task = recipe.task.build()
    examiner = Examiner(recipe, task, tokenizer=tokenizer)
    questions = task.examples(recipe.forks.prompts, seed=recipe.seed, split="train")
    config = BasisConfig(output=max(_RANKS), input=max(_RANKS), group=recipe.group, seed=recipe.forks.seed)
    prompts = [encode(tokenizer, e.prompt) for e in questions]
    bases = collect_bases(model, tokenizer, prompts, config=config, sampler=examiner.sampler)
    gradients, identity = held_out_gradients(recipe, model, examiner=examiner)
    modules = dict(model.named_modules())
    layers = []
    for name in (n for n in bases if n in gradients):
        gradient, u, q = gradients[name], bases[name].output, bases[name].input
        shares = _shares(gradient, u, q)
        d_out, d_in = layer_shape(modules[name])
        null = _shares(gradient, *_random(d_out, d_in, seed=len(layers)))
        if name in identity:
            shares["identity out k=16"] = captured_share(gradient, output=identity[name])
        layers.append({"layer": name, "energy": float(gradient.square().sum()), **shares, "random": null})
    last = residual_writers(model, read_unembedding(model, check=False).width)[-1]
    rows = _by_type(layers) + [_row(f"last writer: {last}", [e for e in layers if e["layer"] == last])]
    return {"rows": rows, "layers": layers, "facts": bases.facts}


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


def _shares(gradient: Tensor, u: Tensor, q: Tensor) -> dict[str, float]:
    found = {f"out k={k}": captured_share(gradient, output=u[:, :k]) for k in _RANKS}
    found |= {f"in k={k}": captured_share(gradient, input=q[:, :k]) for k in _RANKS}
    return found | {f"block {k}x{k}": captured_share(gradient, output=u[:, :k], input=q[:, :k]) for k in _RANKS}


def _random(d_out: int, d_in: int, *, seed: int) -> tuple[Tensor, Tensor]:
    with seeded(seed):
        u, q = (torch.linalg.qr(torch.randn(d, max(_RANKS))).Q for d in (d_out, d_in))
    return u, q


def _by_type(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kinds = dict.fromkeys(entry["layer"].rpartition(".")[2] for entry in layers)
    rows = [_row(kind, [e for e in layers if e["layer"].endswith(f".{kind}")]) for kind in kinds]
    return [*rows, _row("all layers", layers), _row("all layers, random bases", [e["random"] for e in layers])]


def _row(title: str, layers: list[dict[str, Any]]) -> dict[str, Any]:
    return {"layers": title, **{n: sum(e[n] for e in layers) / len(layers) for n in _NAMES}}
