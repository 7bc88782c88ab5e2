"""Measures what a trained policy has become: pass@k, distance from the base, what it forgot, how its weights moved.

Decisions: everything is exact given the completions that are drawn, and these are the same ones for every arm; what is
asked of the untouched base is found once per process; a figure that is not finite or does not exist is null, never a
number. Nothing is changed: neither weights nor adapters, neither modes nor random states.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from forklora.recipes.config import Recipe
from forklora.recipes.evaluate import Examiner
from forklora.recipes.options import OutcomeSpec, TaskSpec
from forklora.recipes.ranks import gathered, this_rank
from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from forklora.collective import ranks
from forklora.divergence import divergences
from forklora.drawing import shared_numbers
from forklora.forward import completion_hidden
from forklora.measure import unchanged_share
from forklora.rollouts import Sampler, evaluating, sample
from forklora.trace import Trace
from forklora.unembed import Unembedding, hidden_only, read_unembedding, unwrap

_TEXT = Path(__file__).parent / "ordinary.txt"
_TOKENS = 256  # positions whose distributions over the vocabulary are alive at a time
_PIECE = 512  # longest piece of a document, in tokens
_BATCH = 32  # prompts sampled together
_TOP = 16  # singular values whose share of the energy is given
_of_base: dict[tuple[str, ...], float] = {}  # figures of untouched models, by what they depend on


def outcome(recipe: Recipe, model: nn.Module, *, base: nn.Module, tokenizer: Any, examiner: Examiner) -> dict[str, Any]:  # noqa: ANN401
    """What is measured of a trained policy, as a record holds it; every rank calls this and gets the same.

    Args:
        recipe: with its options of the outcome; where it has none their defaults count.
        model: the policy, its weights whole: a PeftModel of any kind, or a model whose own weights were trained.
        base: the model before training.
        tokenizer: of both.
        examiner: asks the recipe's own held-out questions.
    """
    spec = recipe.outcome or OutcomeSpec()
    rewards = examiner.table(model, samples=spec.samples)
    divergence = kl_to_base(
        model,
        base,
        prompts=examiner.prompts[: spec.kl_prompts],
        sampler=examiner.sampler,
        samples=recipe.evaluation.samples,
    )
    name = (recipe.model.name, recipe.model.dtype)
    found = {
        "prompts": len(rewards),
        "samples": spec.samples,
        "accuracy": float(rewards.mean()),
        "pass_at": {str(k): share for k, share in pass_at(rewards).items()},
        "kl_to_base": _finite(divergence),
        "text_loss_base": _finite(_once(("text", *name), lambda: text_loss(base, tokenizer))),
        "text_loss": _finite(text_loss(model, tokenizer)),
        "untrained_task": None,
        "untrained_base": None,
        "untrained": None,
        "update": update_figures(model, base),
    }
    if spec.untrained is not None:
        other = _asking(recipe, spec.untrained)
        asker = Examiner(other, other.task.build(), tokenizer=tokenizer)
        key = [group.model_dump_json() for group in (other.task, other.sampling, other.evaluation)]
        found["untrained_task"] = other.task.name
        found["untrained_base"] = _once(("task", *name, *key), lambda: asker.accuracy(base))
        found["untrained"] = asker.accuracy(model)
    return found


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _once(key: tuple[str, ...], find: Callable[[], float]) -> float:
    if key not in _of_base:
        _of_base[key] = find()
    return _of_base[key]


def _asking(recipe: Recipe, other: TaskSpec) -> Recipe:
    """The recipe with another task, and with that task's length and stops."""
    asked = other.build()
    own = {"max_new_tokens": asked.max_new_tokens, "stop": list(asked.stop)}
    return recipe.model_copy(update={"task": other, "sampling": recipe.sampling.model_copy(update=own)})


def pass_at(rewards: Float[Tensor, "prompts samples"]) -> dict[int, float]:
    """Chance that at least one of ``k`` completions passes, for k = 1, 2, 4, .. up to the number ``n`` of samples.

    ``1 - C(n - c, k) / C(n, k)`` for a prompt of whose completions ``c`` pass, averaged over the prompts: the share of
    all subsets of size ``k`` that hold a pass, so the estimate is unbiased. A pass is a reward of 1, nothing less.

    Raises:
        ValueError: there is no completion.
    """
    if not rewards.numel():
        raise ValueError(f"rewards {list(rewards.shape)} hold no completion: nothing can pass.")
    n, passes = rewards.shape[1], (rewards == 1).sum(1).tolist()
    sizes = [2**i for i in range(n.bit_length())]
    return {k: 1 - sum(math.comb(n - c, k) / math.comb(n, k) for c in passes) / len(passes) for k in sizes}


def kl_to_base(
    policy: nn.Module, base: nn.Module, *, prompts: list[list[int]], sampler: Sampler, samples: int
) -> float:
    """Divergence ``KL(policy || base)`` in nats per token, on completions that the policy draws.

    The mean, over all tokens of all completions, of ``sum_a p(a) (log p(a) - log b(a))`` at the place of the token,
    exact over the vocabulary. Both distributions are those of the logits divided by the sampler's temperature. What it
    cuts off (top-k, top-p, min-p) shapes the completions and is no part of ``p`` and ``b``: with it the divergence
    would be infinite as soon as policy and base keep different tokens.

    Args:
        policy: the trained model.
        base: the model before training; where its weights are rounded otherwise, that is part of the distance.
        prompts: token ids of each prompt.
        sampler: how completions are drawn.
        samples: completions of each prompt.

    Every rank calls this and gets the same number.
    """
    total, count = 0.0, 0
    heads = (read_unembedding(policy, check=False), read_unembedding(base, check=False))
    portion = min(_BATCH, math.ceil(len(prompts) / ranks()))
    for i in range(this_rank() * portion, len(prompts), ranks() * portion):
        part = prompts[i : i + portion]
        rows = slice(i * samples, (i + len(part)) * samples)
        luck = shared_numbers("divergence", rows=rows, total=len(prompts) * samples)
        trace = sample(policy, part, sampler=sampler, group=samples, unembedding=heads[0], record=False, luck=luck)
        hidden = (_hidden(policy, trace), _hidden(base, trace))
        total += float(divergences(hidden, heads, temperature=sampler.temperature).double().sum())
        count += len(hidden[0])
    both = gathered((total, count))
    return sum(t for t, _ in both) / sum(n for _, n in both)


def _hidden(model: nn.Module, trace: Trace) -> Tensor:
    """``[tokens, d]``: what predicts each token of the completions."""
    device = next(model.parameters()).device
    named = ("prompt_mask", "completion_ids", "completion_mask")
    columns = {name: getattr(trace, name).to(device) for name in named}
    with evaluating(model):
        return completion_hidden(model, trace.prompt_ids.to(device), **columns)[columns["completion_mask"]]


def text_loss(model: nn.Module, tokenizer: Any) -> float:  # noqa: ANN401
    """Mean negative log-likelihood, in nats per token, of the ordinary English text that comes with the package.

    Each paragraph is a document of its own, read from its beginning; the first token of a document, or of a piece of
    one that is too long for the model, is not predicted. Sums run over the tokens of all documents in float32.
    """
    total, count = 0.0, 0
    head, config = read_unembedding(model, check=False), unwrap(model).config
    longest = min(_PIECE, getattr(config, "max_position_embeddings", None) or _PIECE)
    device = head.weight.device
    with evaluating(model):
        for document in _TEXT.read_text(encoding="utf-8").strip().split("\n\n"):
            ids = torch.tensor(tokenizer(document)["input_ids"], device=device)
            for piece in ids.split(longest):
                total += _loss(model, head, piece)
                count += len(piece) - 1
    return total / count


def _loss(model: nn.Module, head: Unembedding, ids: Tensor) -> float:
    """Sum over all tokens but the first."""
    with hidden_only(model) as caught:
        model(input_ids=ids[None], use_cache=False)
    parts = zip(caught[0][0, :-1].split(_TOKENS), ids[1:].split(_TOKENS), strict=True)
    return sum(float(nn.functional.cross_entropy(head.logits(h), after, reduction="sum")) for h, after in parts)


@torch.no_grad()
def update_figures(model: nn.Module, base: nn.Module) -> dict[str, float | None]:
    """How far the weights moved, and how the movement is spread: figures of ``dW``, merged weight minus base weight.

    Args:
        model: a PeftModel, whose adapted layers are looked at, with what became of their own weights (some adapters
            change them at their start); or a plain model, whose trainable linear layers are, its head left out.
        base: the model before training.

    Returns:
        ``changed_share``, the share of these weights that differ at bfloat16 precision; ``norm``, the Frobenius norm of
        all ``dW`` together; ``stable_rank`` ``|dW|_F^2 / |dW|_2^2`` and ``top16_energy``, the share of ``|dW|_F^2`` in
        the 16 largest singular values, each the plain mean over the layers that moved, large or small, far or near.
        These two are null where nothing moved; all are where there is no such layer or a weight is not finite.
    """
    weights, changed, squares = 0, 0.0, 0.0
    stable, top = [], []
    for before, after, delta in _moves(model, base):
        if not after.isfinite().all():
            weights = 0
            break
        weights += delta.numel()
        changed += (1 - unchanged_share(before, after)) * delta.numel()
        energy = _energies(delta)
        squares += float(energy.sum())
        if energy[0] > 0:
            stable.append(float(energy.sum() / energy[0]))
            top.append(float(energy[:_TOP].sum() / energy.sum()))
    if not weights:
        return dict.fromkeys(("changed_share", "stable_rank", "top16_energy", "norm"))
    means = [sum(values) / len(values) if values else None for values in (stable, top)]
    figures = (changed / weights, *means, math.sqrt(squares))
    return dict(zip(("changed_share", "stable_rank", "top16_energy", "norm"), figures, strict=True))


def _moves(model: nn.Module, base: nn.Module) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Float32 weight before, weight after, and their difference before any rounding, of one layer after the other."""
    inside: dict[str, Any] = dict(unwrap(model).named_modules())
    untouched: dict[str, Any] = dict(unwrap(base).named_modules())
    head = unwrap(model).get_output_embeddings()
    adapted: dict[str, Any] = {name: module for name, module in inside.items() if hasattr(module, "get_delta_weight")}
    own: dict[str, Any] = {
        name: module
        for name, module in inside.items()
        if isinstance(module, nn.Linear | Conv1D) and module is not head and module.weight.requires_grad
    }
    for name, module in (adapted or own).items():
        weight = module.get_base_layer().weight if adapted else module.weight
        before = untouched[name].weight.to(weight.device).float()
        delta = weight.float() - before
        if adapted and not module.merged:
            for adapter in (a for a in module.active_adapters if a in module.r):
                delta = delta + module.get_delta_weight(adapter).float()
        yield before, before + delta, delta


def _energies(delta: Tensor) -> Tensor:
    """Squared singular values, largest first, from the products of the rows or columns, whichever are fewer."""
    m = delta.double() if delta.shape[0] <= delta.shape[1] else delta.double().T
    return torch.linalg.eigvalsh(m @ m.T).flip(0).clamp_min(0)
