"""The fork map: the tokens of a few rollouts as bars of tr C, each with the candidates it was drawn from.

Reads trace/tokens.json (texts, probabilities, spreads), so it needs neither model nor tokenizer. Candidates stand in
an attribute that the style sheet shows on hover, tap or keyboard focus: no script, and a fraction of the bytes that
nested elements would take.
"""

import itertools
import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

MARKS = {"\n": "⏎", " ": "·", "\t": "⇥", "\r": "␍"}
UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"}
SURE = 0.98
SHOWN_FROM = 0.005
MOST_SHOWN = 8
SHORT, OPEN_TOKENS, OPEN_ROLLOUTS = 16, 400, 8
CONTEXT = 36
EDGES = (0.9, 0.5, 0.2, 0.05)
"""Lower edges of the probability classes, likeliest first; a token below the last edge is in the class len(EDGES)."""


def visible(text: str, *, keep: str = "") -> str:
    """Text with every invisible character made visible: newline ⏎, space ·, others by code; `keep` stays as it is."""
    return "".join(_glyph(character, keep) for character in text)


def probability_class(probability: float) -> int:
    """0 where the drawn token was all but certain, up to len(EDGES) where it was a surprise."""
    return sum(probability < edge for edge in EDGES)


def fork_map(trace: Mapping[str, Any]) -> dict[str, Any]:
    """View of one trace for the page.

    Returns the rollouts (prompt, its end, reward, tokens as markup), how many of them stand open and whether all are
    short, the widest distinct forks, the largest tr C, the number of positions and of forks, and the share of all tr C
    that the tallest tenth of the positions holds (None where all are zero).
    """
    rows = [row for row in trace.get("rows") or [] if row.get("tokens")]
    spreads = sorted((finite(token.get("spread")) for row in rows for token in row["tokens"]), reverse=True)
    tallest = spreads[0] if spreads else 0.0
    total = math.fsum(spreads)
    tenth = math.fsum(spreads[: math.ceil(len(spreads) / 10)])
    return {
        "rollouts": [_rollout(row, tallest) for row in rows],
        "shown": _shown([len(row["tokens"]) for row in rows]),
        "short": all(len(row["tokens"]) <= SHORT for row in rows),
        "widest": widest_forks(rows),
        "tallest": tallest,
        "positions": len(spreads),
        "forks": sum(is_fork(token) for row in rows for token in row["tokens"]),
        "tenth": tenth / total if total > 0 else None,
    }


def is_fork(token: Mapping[str, Any]) -> bool:
    """Whether no single candidate holds the mass SURE: the smallest set that does has two tokens or more."""
    shares = [finite(share) for _, share in token.get("candidates") or []]
    return bool(shares) and max(shares) < SURE


def widest_forks(rows: Iterable[Mapping[str, Any]], *, top: int = 8) -> list[dict[str, Any]]:
    """The forks with the largest tr C; rollouts at the same fork (same context and candidates) count once."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        before = visible(str(row.get("prompt") or ""))
        for token in row["tokens"]:
            text = visible(str(token.get("text") or ""))
            if is_fork(token):
                fork = {"context": _end(before), "candidates": _candidates(token), "drawn": []}
                fork = found.setdefault(
                    (before, str(fork["candidates"])), fork | {"spread": finite(token.get("spread"))}
                )
                fork["drawn"].append(text)
            before += text
    return sorted(found.values(), key=lambda fork: -fork["spread"])[:top]


def finite(value: object) -> float:
    """The number, or zero where it is missing, negative or not finite: a bar's height must be one."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return 0.0
    return max(float(value), 0.0)


def _shown(lengths: Sequence[int]) -> int:
    """How many leading rollouts stand open: as many as stay within a few hundred tokens, two at least."""
    within = [total <= OPEN_TOKENS for total in itertools.accumulate(lengths)]
    return min(max(sum(within), 2), OPEN_ROLLOUTS)


def _end(text: str) -> str:
    return text if len(text) <= CONTEXT else "…" + text[-CONTEXT:]


def _glyph(character: str, keep: str) -> str:
    if character in keep:
        return character
    if character in MARKS:
        return MARKS[character]
    return f"‹{ord(character):X}›" if unicodedata.category(character) in UNSEEN else character


def _rollout(row: Mapping[str, Any], tallest: float) -> dict[str, Any]:
    prompt = str(row.get("prompt") or "")
    lines = visible(prompt).rstrip("·").split("⏎")
    ending = next((line for line in reversed(lines) if line), "")
    return {
        "ending": _end(ending),
        "prompt": visible(prompt, keep="\n ").replace("\n", "⏎\n"),
        "reward": row.get("reward"),
        "tokens": Markup("").join(_token(token, tallest) for token in row["tokens"]),
    }


def _token(token: Mapping[str, Any], tallest: float) -> Markup:
    text, probability = visible(str(token.get("text") or "")), finite(token.get("probability"))
    spread, candidates = finite(token.get("spread")), _candidates(token)
    lines = [f"drawn {text}   p {probability:.3g}   tr C {spread:.3g}"]
    for candidate, share in candidates:
        drawn = " ◂" if candidate == text else ""
        lines.append(f"{share:.3f} {'█' * round(10 * share):<10} {candidate}{drawn}")
    # Only a fork is a button: it takes a tap and keyboard focus, and sure tokens do not lengthen the tab order.
    tag = "button" if is_fork(token) else "span"
    height = round(100 * spread / tallest) if tallest > 0 else 0
    return Markup('<{0} class="t p{1}" style="--h:{2}" data-c="{3}">{4}</{0}>').format(
        tag, probability_class(probability), height, "\n".join(lines), text
    )


def _candidates(token: Mapping[str, Any]) -> Sequence[tuple[str, float]]:
    pairs = [(visible(str(text)), finite(share)) for text, share in token.get("candidates") or []]
    return [(text, share) for text, share in pairs if share >= SHOWN_FROM][:MOST_SHOWN]
