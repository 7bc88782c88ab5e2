"""Generates completions and records the sampler's distribution while doing it.

Decisions: a prompt is run once for its group; the logits pass through the processors first and the token is drawn from
exactly the distribution that is recorded; kept per position are the likeliest tokens, the mass outside them, the drawn
token's log-probability, ``tr C`` and the backward signal ``delta``, never the vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from forklora.forward import Calls, new_cache
from forklora.trace import Trace
from forklora.unembed import Unembedding, evaluation_mode, hidden_only, read_unembedding

Processor = Callable[..., Tensor]
Stop = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Sampler:
    """What is drawn and when a completion ends.

    Attributes:
        max_new_tokens: longest completion, in tokens.
        temperature: divides the logits; it must be positive.
        top_k: keep the likeliest ``top_k`` tokens; 0 keeps all.
        top_p: keep the smallest set reaching this mass; 1 keeps all.
        min_p: drop tokens below this share of the likeliest token's probability.
        repetition_penalty: factor against tokens of prompt and completion; 1 leaves them alone.
        stop_ids: tokens that end a completion (they belong to it).
        stop: further rule, ``completions [n, l] -> bool [n]``, asked after each token.
        processors: functions ``(ids [n, l], scores [n, V]) -> scores`` used instead of the settings above.
        keep: likeliest tokens stored per position.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    stop_ids: tuple[int, ...] = ()
    stop: Stop | None = None
    processors: Sequence[Processor] | None = field(default=None, repr=False)
    keep: int = 8

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or not self.temperature > 0:
            raise ValueError(
                f"max_new_tokens={self.max_new_tokens} must be at least 1 and temperature={self.temperature} above 0."
            )

    def pipeline(self) -> list[Processor]:
        """The functions the scores pass through, in transformers' order."""
        if self.processors is not None:
            return list(self.processors)
        import transformers as hf

        steps: list[tuple[bool, Callable[[], Processor]]] = [
            (self.repetition_penalty != 1.0, lambda: hf.RepetitionPenaltyLogitsProcessor(self.repetition_penalty)),
            (self.temperature != 1.0, lambda: hf.TemperatureLogitsWarper(float(self.temperature))),
            (self.top_k > 0, lambda: hf.TopKLogitsWarper(self.top_k)),
            (self.top_p < 1.0, lambda: hf.TopPLogitsWarper(self.top_p)),
            (bool(self.min_p), lambda: hf.MinPLogitsWarper(self.min_p or 0.0)),
        ]
        return [make() for asked, make in steps if asked]


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within the block the model is in evaluation mode without gradients; every module's mode is put back."""
    with evaluation_mode(model), torch.no_grad():
        yield


def pad_prompts(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[Int[Tensor, "n p"], Bool[Tensor, "n p"]]:
    """Left-pad token lists to one rectangle: ids ``[n, p]`` and a mask that comes from lengths, not from values."""
    if not prompts or any(len(p) == 0 for p in prompts):
        raise ValueError(f"{len(prompts)} prompts, {sum(len(p) == 0 for p in prompts)} of them without a token.")
    width = max(len(p) for p in prompts)
    ids = torch.tensor([[pad_id] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[False] * (width - len(p)) + [True] * len(p) for p in prompts])
    return ids, mask


def sample(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    sampler: Sampler,
    group: int = 1,
    unembedding: Unembedding | None = None,
    record: bool = True,
) -> Trace:
    """Draw ``group`` completions for each prompt: ``len(prompts) * group`` rows, in the order of the prompts.

    Prompts that stand there several times are run once. Randomness comes from torch's global generator of the model's
    device, as everywhere in transformers.

    Args:
        model: (wrapped) causal language model; left in the mode it came in.
        prompts: token ids of each prompt.
        sampler: what is drawn and when it ends.
        group: completions per prompt.
        unembedding: the model's head, read anew if not given.
        record: also store the backward signal ``delta``; without it only tokens and candidates are kept.
    """
    head = read_unembedding(model) if unembedding is None else unembedding
    device = head.weight.device
    pad = sampler.stop_ids[0] if sampler.stop_ids else 0  # any id will do: masks come from lengths
    place: dict[tuple[int, ...], int] = {}
    index = [place.setdefault(tuple(p), len(place)) for p in prompts]
    ids, mask = (t.to(device) for t in pad_prompts(list(place), pad))
    rows = torch.tensor(index, device=device).repeat_interleave(group)
    with evaluating(model):
        steps = _decode(model, head, ids=ids, mask=mask, rows=rows, sampler=sampler, record=record)
    columns = {name: torch.stack([s[name] for s in steps], 1).cpu() for name in steps[0]}
    drawn = columns.pop("alive")
    facts = {name: getattr(sampler, name) for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
    return Trace(
        prompt_ids=ids[rows].cpu(),
        prompt_mask=mask[rows].cpu(),
        completion_ids=torch.where(drawn, columns.pop("token"), pad),
        completion_mask=drawn,
        group=rows.cpu(),
        reward=None,
        delta=columns.pop("delta", None),
        facts={k: str(v) for k, v in facts.items()} | {"vocabulary": str(head.vocabulary)},
        **columns,
    )


def _decode(
    model: nn.Module,
    head: Unembedding,
    *,
    ids: Tensor,
    mask: Tensor,
    rows: Tensor,
    sampler: Sampler,
    record: bool,
) -> list[dict[str, Tensor]]:
    """Token after token for all rows, until the longest one is done: one dict of ``[n, ..]`` tensors a step."""
    calls, pipeline = Calls.of(model), sampler.pipeline()
    if not calls.shares_prompt:
        ids, mask, rows = ids[rows], mask[rows], torch.arange(len(rows), device=rows.device)
    cache = new_cache(model)
    with hidden_only(model) as caught:
        model(input_ids=ids, **calls.arguments(mask, length=ids.shape[1], cache=cache))
        if calls.shares_prompt:
            cache.batch_select_indices(rows)
        hidden = caught.pop()[:, -1][rows]
        so_far, mask = _without_padding(ids, mask)[rows], mask[rows]
        alive = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        steps: list[dict[str, Tensor]] = []
        while True:
            step = _draw(head, hidden, so_far, pipeline=pipeline, sampler=sampler, record=record)
            step["alive"] = alive
            steps.append({k: v if k in ("alive", "token") else _blank(v, alive) for k, v in step.items()})
            so_far = torch.cat([so_far, step["token"][:, None]], 1)
            mask = torch.cat([mask, alive[:, None]], 1)
            alive = alive & ~_ended(so_far[:, ids.shape[1] :], sampler)
            if len(steps) == sampler.max_new_tokens or not alive.any():
                return steps
            model(input_ids=step["token"][:, None], **calls.arguments(mask, length=1, cache=cache))
            hidden = caught.pop()[:, -1]


def _draw(
    head: Unembedding,
    hidden: Float[Tensor, "n d"],
    so_far: Int[Tensor, "n l"],
    *,
    pipeline: list[Processor],
    sampler: Sampler,
    record: bool,
) -> dict[str, Tensor]:
    """One token per row from the distribution that the processed scores state, and what is kept of it."""
    logits = head.logits(hidden)
    scores = logits
    for processor in pipeline:
        scores = processor(so_far, scores)
    mu = scores.softmax(-1)
    token = draw(mu)
    probs, candidates = mu.topk(min(sampler.keep, mu.shape[-1]))
    found = {
        "token": token,
        "logprob": mu.gather(1, token[:, None])[:, 0].log(),
        "candidate_ids": torch.where(probs > 0, candidates, -1),
        "candidate_probs": probs,
        # summed over the tail itself: one minus the sum would lose everything below 1e-7
        "leak": mu.scatter(1, candidates, 0.0).sum(-1),
    }
    delta, spread = head.signal(mu, token, logits=logits)
    found["spread"] = spread / sampler.temperature**2
    if record:
        found["delta"] = delta / sampler.temperature
    return found


def draw(mu: Float[Tensor, "n v"]) -> Int[Tensor, " n"]:
    """One token per row by inverting the cumulative distribution in float64; a token without mass is never drawn.

    One uniform number per row instead of one per token: on a CPU this is several times faster than ``multinomial``.
    """
    total = mu.double().cumsum(-1)
    uniform = torch.rand(len(mu), 1, dtype=torch.float64, device=mu.device) * (1 - 2**-50)
    return torch.searchsorted(total, uniform * total[:, -1:], right=True)[:, 0]


def _blank(values: Tensor, alive: Tensor) -> Tensor:
    """Rows that ended before this position hold nothing: -1 for ids, 0 for numbers."""
    empty = -1 if values.dtype == torch.long else 0.0
    return torch.where(alive.view(-1, *[1] * (values.dim() - 1)), values, empty)


def _ended(completions: Tensor, sampler: Sampler) -> Tensor:
    last = completions[:, -1]
    ended = torch.isin(last, torch.tensor(sampler.stop_ids, device=last.device, dtype=last.dtype))
    return ended if sampler.stop is None else ended | sampler.stop(completions)


def _without_padding(ids: Tensor, mask: Tensor) -> Tensor:
    """Prompt ids whose padding repeats the row's first token, so that a repetition penalty does not see the pad."""
    first = ids.gather(1, mask.long().argmax(1, keepdim=True))
    return torch.where(mask, ids, first)


def stop_at(tokenizer: Any, strings: Sequence[str]) -> Stop | None:  # noqa: ANN401
    """A stop rule that ends a completion once one of the strings stands in it, by transformers' own criterion."""
    if not strings:
        return None
    from transformers import StopStringCriteria

    criterion = StopStringCriteria(tokenizer, list(strings))
    return lambda ids: criterion(ids, None)  # pyright: ignore[reportArgumentType] - any integer tensor
