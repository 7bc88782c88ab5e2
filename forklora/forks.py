"""Finds in a trace the positions where it could have gone another way, their candidate tokens and their leak.

Decisions: the candidate set is the smallest that reaches a stated mass, capped in size; a position decides for itself,
so neither padding nor the way a batch is split changes anything; the candidates' vectors come from a function the
caller passes, so that no model is needed here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor
from torch.nn.functional import pad

from forklora.trace import Trace

# Tokens shown before a fork: enough to recognize the place, few enough for one line.
_CONTEXT_TOKENS = 16


@dataclass(frozen=True, eq=False)
class Candidates:
    """Candidate set ``K_t`` of every position of a trace.

    Attributes:
        ids: candidate tokens, likeliest first; -1 in unused slots.
        probs: their probabilities ``mu`` under the sampler, not renormalized; 0 in unused slots.
        size: ``|K_t|``; 1 where the sampler is confident, 0 where nothing was drawn.
        leak: ``rho_t``, sampler mass outside ``K_t``; 0 where nothing was drawn.
    """

    ids: Int64[Tensor, "N T cap"]
    probs: Float32[Tensor, "N T cap"]
    size: Int64[Tensor, "N T"]
    leak: Float32[Tensor, "N T"]


@dataclass(frozen=True, eq=False)
class Forks:
    """Positions whose candidate set has two or more tokens; F of them, row after row.

    Attributes:
        rows: row of each fork in its trace.
        positions: completion position of each fork.
        ids: candidate tokens, likeliest first; -1 in unused slots.
        probs: their probabilities ``mu`` under the sampler, not renormalized; 0 in unused slots.
        leak: sampler mass outside the candidates.
    """

    rows: Int64[Tensor, " F"]
    positions: Int64[Tensor, " F"]
    ids: Int64[Tensor, "F cap"]
    probs: Float32[Tensor, "F cap"]
    leak: Float32[Tensor, " F"]

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, index: slice | list[int] | Int64[Tensor, " n"] | Bool[Tensor, " F"]) -> Forks:
        """Some of the forks: a slice, indices, or a mask; for work in pieces and for controls."""
        return Forks(self.rows[index], self.positions[index], self.ids[index], self.probs[index], self.leak[index])


class ForkContext(TypedDict):
    """One kind of fork: tokens before its first occurrence, candidates with mean probability, number of occurrences."""

    context: str
    candidates: list[tuple[str, float]]
    count: int


def candidate_sets(trace: Trace, *, mass: float = 0.98, cap: int = 8) -> Candidates:
    """The smallest set of tokens reaching ``mass`` at each position, at most ``cap`` of them.

    A token without probability is never a candidate. Where the trace stores too few tokens to reach ``mass``, the set
    is all of them and the leak says what is missing. Source: "Low-rank in hidden space", section 2.

    Raises:
        ValueError: ``mass`` outside 0..1, or ``cap`` below 1.
    """
    if not 0 < mass <= 1 or cap < 1:
        raise ValueError(f"mass={mass} must lie above 0 and at most at 1, and cap={cap} must be at least 1.")
    probs = trace.candidate_probs
    mass_before = pad(probs.double().cumsum(-1), (1, 0))[..., :-1]
    chosen = (mass_before < mass) & (probs > 0) & trace.completion_mask[..., None]
    chosen[..., cap:] = False
    room = (0, cap - probs.shape[-1])  # negative: cut off
    leak = (trace.leak + probs.masked_fill(chosen, 0).sum(-1)).clamp(0, 1)
    return Candidates(
        ids=pad(trace.candidate_ids.masked_fill(~chosen, -1), room, value=-1),
        probs=pad(probs.masked_fill(~chosen, 0), room),
        size=chosen.sum(-1),
        leak=leak.masked_fill(~trace.completion_mask, 0),
    )


def find_forks(trace: Trace, *, mass: float = 0.98, cap: int = 8) -> Forks:
    """The positions of a trace whose candidate set (see :func:`candidate_sets`) has two or more tokens; maybe none."""
    sets = candidate_sets(trace, mass=mass, cap=cap)
    rows, positions = (sets.size >= 2).nonzero(as_tuple=True)
    at = rows, positions
    return Forks(rows, positions, sets.ids[at], sets.probs[at], sets.leak[at])


def span_differences(
    forks: Forks, rows_of: Callable[[Int64[Tensor, " n"]], Float[Tensor, "n d"]]
) -> Float32[Tensor, "M d"]:
    """Weighted differences of competing tokens' output vectors; they span ``D``.

    One row ``sqrt(mu_a) (w_a - m_t)`` for each candidate ``a`` of each fork ``t``, M in all, where ``m_t`` is the
    candidates' mean ``sum_K mu_b w_b / sum_K mu_b``; a fork's rows span at most ``|K_t| - 1`` directions. Their outer
    products add up to the covariance ``C_t`` restricted to ``K_t``: never above ``C_t``, equal where the leak is zero.
    Source: "Low-rank in hidden space", sections 1 and 2.

    Args:
        forks: where, and between which tokens.
        rows_of: output vectors ``w_a`` of token ids, each id asked for once.
    """
    used = forks.ids >= 0
    tokens, place = forks.ids[used].unique(return_inverse=True)
    vectors = rows_of(tokens).float()
    if vectors.ndim != 2 or len(vectors) != len(tokens):
        raise ValueError(f"rows_of returned {list(vectors.shape)} for {len(tokens)} tokens; it must be one row each.")
    index = torch.zeros_like(forks.ids)
    index[used] = place
    table = vectors[index]
    probs = forks.probs[..., None]
    mean = (probs * table).sum(1, keepdim=True) / probs.sum(1, keepdim=True)
    return (probs.sqrt() * (table - mean))[used]


def fork_contexts(
    trace: Trace, forks: Forks, *, decode: Callable[[list[int]], str], top: int = 20
) -> list[ForkContext]:
    """The commonest kinds of fork as text: forks between the same tokens are one kind.

    Args:
        trace: where the forks were found.
        forks: what :func:`find_forks` found in it.
        decode: tokens to text.
        top: kinds listed, commonest first; among equals the one that comes first in the trace.
    """
    kinds: dict[frozenset[int], list[int]] = defaultdict(list)
    for i, ids in enumerate(forks.ids.tolist()):
        kinds[frozenset(ids) - {-1}].append(i)
    listed = sorted(kinds.values(), key=len, reverse=True)[:top]
    return [
        {
            "context": decode(_tokens_before(trace, forks.select(i[:1]))),
            "candidates": [(decode([token]), prob) for token, prob in _mean_probs(forks, i)],
            "count": len(i),
        }
        for i in listed
    ]


def _tokens_before(trace: Trace, fork: Forks) -> list[int]:
    """The last tokens one fork was drawn after, tool tokens included: completions have padding on the right only."""
    row, position = int(fork.rows), int(fork.positions)
    prompt = trace.prompt_ids[row][trace.prompt_mask[row]]
    return torch.cat([prompt, trace.completion_ids[row, :position]])[-_CONTEXT_TOKENS:].tolist()


def _mean_probs(forks: Forks, index: Sequence[int]) -> list[tuple[int, float]]:
    total: dict[int, float] = defaultdict(float)
    for i in index:
        for token, prob in zip(forks.ids[i].tolist(), forks.probs[i].tolist(), strict=True):
            total[token] += prob / len(index)
    total.pop(-1, None)
    return sorted(total.items(), key=lambda item: -item[1])
