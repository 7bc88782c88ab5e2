"""Completes a model's prompts and looks at the forks: where they are, between which tokens, and what they span.

Decisions: no reward is needed, and where a task gives one it is only shown; numbers of the map are kept to three digits
and the map ends at a stated number of tokens, so that a page stays small; the bounds are left out where output vectors
depend on the position (a soft cap).
"""

from dataclasses import replace
from typing import Any

from forklora.recipes.forkmap import fork_map
from forklora.recipes.opening import Opened, opened
from forklora.recipes.spans import rollouts
from forklora.recipes.subject import ForkSubject
from forklora.recipes.tokens import token_rows

from forklora.bounds import Span, fork_span, outside_span, spread_bounds
from forklora.forks import Forks, candidate_sets, find_forks, fork_contexts
from forklora.sketch import Sketch
from forklora.trace import Trace
from forklora.unembed import Unembedding, read_unembedding

_MAPPED, _MAPPED_TOKENS = 200, 16_000  # on the map: a page of them stays under 5 MB
_DIGITS, _SPECTRUM, _FREQUENT, _WIDTH = 3, 64, 20, 256
_SHARES = (0.5, 0.9, 0.99, 0.999)  # of the candidates' covariance, whose directions are counted


def run_forks(subject: ForkSubject) -> tuple[dict[str, Any], Trace]:
    """What is found, ready for JSON, and the rollouts themselves.

    Args:
        subject: model and prompts, and what makes a candidate.

    Returns:
        ``figures``; ``span``, directions of the candidates' differences; ``frequent``, the commonest forks;
        ``spectrum`` of the averaged covariance of the output vectors; ``bounds`` of theory beside the data, null for a
        model with a soft cap; ``rows``, the rollouts as the map reads them. And the trace.
    """
    found = opened(subject)
    head, parts = read_unembedding(found.model, check=False), []
    for trace in rollouts(found, subject):
        parts.append(_scored(found, trace, first=sum(map(len, parts)) // subject.group))
    trace, asked = Trace.concat(parts), {"mass": subject.mass, "cap": subject.cap}
    forks, decode = find_forks(trace, **asked), found.tokenizer.decode
    rows = token_rows(trace.select(range(_mapped(trace))), decode, digits=_DIGITS)
    uncapped, temperature = head.soft_cap is None, found.sampler.temperature
    span = fork_span(forks, head.rows, temperature=temperature) if uncapped else None
    result = {
        "subject": subject.model_dump(mode="json"),
        "figures": _figures(trace, forks, asked) | {"top_tenth": fork_map({"rows": rows})["tenth"]},
        "span": None if span is None else _dimensions(span),
        "frequent": fork_contexts(trace, forks, decode=decode, top=_FREQUENT),
        "spectrum": _spectrum(trace, width=head.width),
        "bounds": None if span is None else _bounds(trace, head, span=span, found=found, asked=asked),
        "rows": rows,
    }
    return result, trace


def _scored(found: Opened, trace: Trace, *, first: int) -> Trace:
    """The trace with rewards where a task gives them; its prompts are those from ``first`` on."""
    if found.task is None:
        return trace
    return replace(trace, reward=found.rewards(trace, first=first, samples=len(trace) // len(trace.group.unique())))


def _mapped(trace: Trace) -> int:
    """Leading rollouts that the map holds."""
    within = int((trace.completion_mask.sum(1).cumsum(0) <= _MAPPED_TOKENS).sum())
    return min(max(within, 1), _MAPPED, len(trace))


def _figures(trace: Trace, forks: Forks, asked: dict[str, Any]) -> dict[str, Any]:
    drawn = trace.completion_mask
    sets = candidate_sets(trace, **asked)
    assert trace.spread is not None, "rollouts are recorded"
    spread = trace.spread[drawn].double()
    at_forks = (sets.size >= 2)[drawn]  # noqa: PLR2004 - candidates that make a fork
    total = float(spread.sum())
    return {
        "rollouts": len(trace),
        "prompts": len(trace.group.unique()),
        "positions": int(drawn.sum()),
        "forks": len(forks),
        "distinct_forks": len({frozenset(ids) for ids in forks.ids.tolist()}),
        "mean_candidates": float((forks.ids >= 0).sum(-1).double().mean()) if len(forks) else None,
        "mean_leak": float(sets.leak[drawn].double().mean()),
        "leak_at_forks": float(forks.leak.double().mean()) if len(forks) else None,
        "mean_spread": float(spread.mean()),
        "spread_at_forks": float(spread[at_forks].sum()) / total if total > 0 else None,
        "mean_reward": None if trace.reward is None else float(trace.reward.double().mean()),
    }


def _dimensions(span: Span) -> dict[str, Any]:
    """Directions that hold a share of the energy of the candidates' covariances, and how many there are at all."""
    held = [{"share": share, "dimension": span.dimension(share)} for share in _SHARES]
    return {"held": held, "dimension": len(span.values), "counted": span.counted}


def _spectrum(trace: Trace, *, width: int) -> list[float]:
    """Leading eigenvalues of the mean of ``delta delta^T``, whose expectation is the averaged covariance."""
    sketch = Sketch(width, width=min(_WIDTH, width), seed=0)
    assert trace.delta is not None, "rollouts are recorded"
    sketch.add(trace.delta[trace.completion_mask])
    return (sketch.spectrum(_SPECTRUM) / sketch.count).tolist()


def _bounds(trace: Trace, head: Unembedding, *, span: Span, found: Opened, asked: dict[str, Any]) -> dict[str, Any]:
    """Both bounds on ``tr C`` at every position, and the one on what lies outside the span in the mean."""
    temperature = found.sampler.temperature
    largest = float(head.squared_norms().max().sqrt())
    checked = spread_bounds(trace, head.rows, largest=largest, temperature=temperature)
    outside, drawn = outside_span(trace, span.basis), trace.completion_mask
    leaked = candidate_sets(trace, **asked).leak[drawn].double()
    known = checked.near > 0
    assert trace.delta is not None, "rollouts are recorded"
    first, second = checked.violations
    return {
        "positions": len(checked.spread),
        "largest_norm": largest,
        "spread_above_near": first,
        "near_above_far": second,
        "spread_of_near": float((checked.spread / checked.near)[known].median()) if known.any() else None,
        "near_of_far": float((checked.near / checked.far)[checked.far > 0].median()) if known.any() else None,
        "outside": float(outside.mean()),
        "outside_share": float(outside.sum() / trace.delta[drawn].double().square().sum()),
        "outside_bound": float(4 * (largest / temperature) ** 2 * leaked.mean()),
    }
