"""A trace in words: each rollout's prompt, reward and tokens, with the candidates each token was drawn from."""

from collections.abc import Callable
from typing import Any

from forklora.trace import Trace


def token_rows(trace: Trace, decode: Callable[[list[int]], str], *, digits: int | None = None) -> list[dict[str, Any]]:
    """Rows as the fork map reads them: ``prompt``, ``reward`` and ``tokens``, each with its candidates.

    Args:
        trace: rollouts, with their spread; reward is None where it holds none.
        decode: tokens to text.
        digits: significant digits of the numbers; None keeps all.
    """

    def number(value: float) -> float:
        return value if digits is None else float(f"{value:.{digits}g}")

    def token(i: int, t: int) -> dict[str, Any]:
        listed = zip(trace.candidate_ids[i, t].tolist(), trace.candidate_probs[i, t].tolist(), strict=True)
        assert trace.spread is not None, "a trace that is recorded holds its spread"
        return {
            "text": decode([int(trace.completion_ids[i, t])]),
            "probability": number(float(trace.logprob[i, t].exp())),
            "spread": number(float(trace.spread[i, t])),
            "candidates": [[decode([a]), number(p)] for a, p in listed if a >= 0],
        }

    return [
        {
            "prompt": decode(trace.prompt_ids[i][trace.prompt_mask[i]].tolist()),
            "reward": None if trace.reward is None else float(trace.reward[i]),
            "tokens": [token(i, t) for t in trace.completion_mask[i].nonzero()[:, 0].tolist()],
        }
        for i in range(len(trace))
    ]
