"""Generates completions and records the sampler's distribution while doing it.

Decisions: a prompt is run once for its group, and the distribution of its first token found once; rows that have ended
leave the batch; kept per position are the drawn token, its log-probability, the ``keep`` likeliest tokens, the mass
outside them, ``tr C`` and the backward signal ``delta``: ``12 keep + 4 d + 21`` bytes, never the vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from forklora.attention import CannotShare
from forklora.drawing import Drawer, Processor
from forklora.forward import Calls
from forklora.packing import packed
from forklora.trace import Trace
from forklora.unembed import Unembedding, evaluation_mode, hidden_only, read_unembedding

Stop = Callable[[Tensor], Tensor]
Luck = Callable[[int], Tensor]  # place of a token in its completion -> float64 numbers in 0..1, one per row


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

    def drawer(self, head: Unembedding, *, record: bool = True) -> Drawer:
        """What draws from these settings at a head; with ``record`` it also finds ``delta`` and ``spread``."""
        norms = head.squared_norms() if record else None
        return Drawer(head, tuple(self.pipeline()), keep=self.keep, temperature=self.temperature, norms=norms)


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
    luck: Luck | None = None,
) -> Trace:
    """Draw ``group`` completions for each prompt: ``len(prompts) * group`` rows, in the order of the prompts.

    Prompts that stand there several times are run once.

    Args:
        model: (wrapped) causal language model; left in the mode it came in.
        prompts: token ids of each prompt.
        sampler: what is drawn and when it ends.
        group: completions per prompt.
        unembedding: the model's head, read anew if not given.
        record: also find the backward signal ``delta`` and its expected square ``spread``; without it only tokens and
            candidates are kept.
        luck: the random numbers for the ``t``-th token of all rows. None takes them from torch's global generator of
            the model's device, as everywhere in transformers.
    """
    head = read_unembedding(model) if unembedding is None else unembedding
    device = head.weight.device
    pad = sampler.stop_ids[0] if sampler.stop_ids else 0  # any id will do: masks come from lengths
    place: dict[tuple[int, ...], int] = {}
    index = [place.setdefault(tuple(p), len(place)) for p in prompts]
    ids, mask = (t.to(device) for t in pad_prompts(list(place), pad))
    rows = torch.tensor(index, device=device).repeat_interleave(group)
    with evaluating(model):
        drawer = sampler.drawer(head, record=record)
        columns = _decode(model, drawer, sampler=sampler, luck=luck, prompts=(ids, mask, rows))
    drawn = columns.pop("alive")
    facts = {name: getattr(sampler, name) for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
    return Trace(
        prompt_ids=ids[rows].cpu(),
        prompt_mask=mask[rows].cpu(),
        completion_ids=torch.where(drawn, columns.pop("token"), pad),
        completion_mask=drawn,
        group=rows.cpu(),
        facts={k: str(v) for k, v in facts.items()} | {"vocabulary": str(head.vocabulary)},
        **columns,
    )


def _decode(
    model: nn.Module,
    drawer: Drawer,
    *,
    sampler: Sampler,
    luck: Luck | None,
    prompts: tuple[Tensor, Tensor, Tensor],
) -> dict[str, Tensor]:
    """Token after token for all rows, until the longest one is done: the columns ``[n, t, ..]`` of a trace."""
    state, calls = torch.get_rng_state(), Calls.of(model)
    ids, mask, rows = prompts
    while True:
        decoder = _Decoder(model, drawer, calls=calls, sampler=sampler, luck=luck)
        try:
            with calls.attending(model), packed(model, tokens=sampler.max_new_tokens, leave=drawer.head.head):
                return decoder.run(ids, mask, rows=rows)
        except CannotShare:
            torch.set_rng_state(state)
            calls = Calls.of(model)


class _Decoder:
    """Decodes rows that share prompts; rows that have ended leave the batch once they are a quarter of it."""

    def __init__(self, model: nn.Module, drawer: Drawer, *, calls: Calls, sampler: Sampler, luck: Luck | None) -> None:
        self.model, self.drawer, self.calls, self.sampler, self.luck = model, drawer, calls, sampler, luck
        # processors of the caller's own may know the rows of a batch by their places
        self.shrinks = calls.shares_prompt and sampler.processors is None

    def run(self, ids: Tensor, mask: Tensor, *, rows: Tensor) -> dict[str, Tensor]:
        calls, sampler, every = self.calls, self.sampler, len(rows)
        if not calls.shares_prompt:
            ids, mask, rows = ids[rows], mask[rows], torch.arange(every, device=rows.device)
        cache, record = calls.cache(self.model), _Columns(every)
        live = torch.arange(every, device=rows.device)  # rows of the trace that the rows of the batch belong to
        alive = torch.ones_like(live, dtype=torch.bool)
        with hidden_only(self.model) as caught:
            self.model(input_ids=ids, **calls.arguments(mask, length=ids.shape[1], cache=cache))
            hidden, seen = caught.pop()[:, -1], _without_padding(ids, mask)
            token = self._draw(hidden, seen, of=rows, live=live, alive=alive, record=record)
            if calls.shares_prompt:
                cache.batch_select_indices(rows)
            seen, mask = seen[rows], mask[rows]
            while True:
                seen, mask = torch.cat([seen, token[:, None]], 1), torch.cat([mask, alive[:, None]], 1)
                alive = alive & ~_ended(seen[:, ids.shape[1] :], sampler)
                if len(record.steps) == sampler.max_new_tokens or not alive.any():
                    return record.finished()
                if self.shrinks and 4 * int(alive.sum()) <= 3 * len(alive):
                    kept = alive.nonzero()[:, 0]
                    cache.batch_select_indices(kept)
                    seen, mask, token, live, alive = (t[kept] for t in (seen, mask, token, live, alive))
                self.model(input_ids=token[:, None], **calls.arguments(mask, length=1, cache=cache))
                of = torch.arange(len(live), device=live.device)
                token = self._draw(caught.pop()[:, -1], seen, of=of, live=live, alive=alive, record=record)

    def _draw(
        self, hidden: Tensor, seen: Tensor, *, of: Tensor, live: Tensor, alive: Tensor, record: "_Columns"
    ) -> Tensor:
        # one number for every row of the trace, so that a row's luck does not depend on which others have ended
        if self.luck is None:
            uniform = torch.rand(record.rows, dtype=torch.float64, device=live.device)[live]
        else:
            uniform = self.luck(len(record.steps)).to(live.device)[live]
        found = self.drawer.tokens(hidden, seen, of=of, uniform=uniform)
        record.add(found | {"alive": alive}, live[alive], which=alive)
        return found["token"]


class _Columns:
    """Columns of a trace from what was found position by position; where nothing was, -1 for ids and 0 for numbers."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.steps: list[tuple[Tensor, dict[str, Tensor]]] = []

    def add(self, found: dict[str, Tensor], rows: Tensor, *, which: Tensor) -> None:
        self.steps.append((rows, {name: values[which] for name, values in found.items()}))

    def finished(self) -> dict[str, Tensor]:
        columns = {}
        for name, values in self.steps[0][1].items():
            empty = -1 if values.dtype == torch.long else 0
            shape = (self.rows, len(self.steps), *values.shape[1:])
            column = torch.full(shape, empty, dtype=values.dtype, device=values.device)
            for t, (rows, found) in enumerate(self.steps):
                column[rows, t] = found[name]
            columns[name] = column.cpu()
        return columns


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
