"""Makes of a recorded trace what the controls of a comparison read their bases from, in place of the forks.

Decisions: only the backward signal is changed; tokens, distributions, prompts and pseudo-advantages stay as they were
drawn, so that a control differs from the forks in nothing else.
"""

from dataclasses import replace

import torch

from forklora.bases import Change
from forklora.drawing import generator_of
from forklora.forks import find_forks
from forklora.trace import Trace
from forklora.unembed import Unembedding


def control(signal: str, *, seed: int) -> Change | None:
    """The change that a signal of a recipe stands for: ``forks`` (none), ``shuffled`` or ``confident``."""
    if signal == "forks":
        return None
    return confident if signal == "confident" else lambda trace, head: shuffled(trace, head, seed=seed)


def confident(trace: Trace, _: Unembedding) -> Trace:
    """The signal of positions with one candidate alone; that of the forks is zero."""
    delta, forks = _signal(trace).clone(), find_forks(trace)
    delta[forks.rows, forks.positions] = 0
    return replace(trace, delta=delta)


def shuffled(trace: Trace, head: Unembedding, *, seed: int) -> Trace:
    """The signal that the same probabilities would send if every token were another one.

    ``delta' = w_p(y) - sum_K mu_a w_p(a) / sum_K mu_a`` over the recorded candidates ``K`` with one random permutation
    ``p`` of the tokens that the tokenizer knows, scaled so that ``|delta'| = |delta|`` wherever there are two
    candidates or more, or a drawn token that is none of them; elsewhere it is zero.
    """
    delta, valid = _signal(trace), head.valid_ids.cpu()
    place = torch.arange(len(head.weight))
    place[valid] = valid[torch.randperm(len(valid), generator=generator_of(f"shuffled/{seed}"))]
    where, probs = trace.completion_mask.cpu(), trace.candidate_probs.cpu()
    ids = place[trace.candidate_ids.cpu()[where].clamp_min(0)]  # [n, K]
    drawn = place[trace.completion_ids.cpu()[where]]
    weights = probs[where] / probs[where].sum(-1, keepdim=True)
    vectors = head.weight.detach()
    mean = torch.stack([w @ vectors[i].float().cpu() for w, i in zip(weights, ids, strict=True)])
    found = vectors[drawn].float().cpu() - mean
    norms = delta.cpu()[where].float().norm(dim=-1, keepdim=True)
    found = found / found.norm(dim=-1, keepdim=True).clamp_min(1e-30) * norms
    changed = torch.zeros_like(delta)
    changed[trace.completion_mask] = found.to(delta)
    return replace(trace, delta=changed)


def _signal(trace: Trace) -> torch.Tensor:
    if trace.delta is None:
        raise ValueError("the trace holds no backward signal: sample it with record=True.")
    return trace.delta
