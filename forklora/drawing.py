"""Draws one token per row from processed scores, and keeps of the distribution what is stated, never the vocabulary.

Decisions: the token is drawn from exactly the distribution that is recorded; rows are worked off in blocks, so that no
more than a stated number of probabilities is alive at a time; the draw does not depend on how rows are split.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from forklora.unembed import Unembedding

Processor = Callable[..., Tensor]
_ALIVE = 1 << 23  # probabilities worked on at a time: 32 MiB in float32
_BLOCK = 256


@dataclass(frozen=True, eq=False)
class Drawer:
    """How tokens are drawn and what is kept.

    Attributes:
        head: the model's unembedding.
        pipeline: functions ``(ids, scores) -> scores``.
        keep: likeliest tokens kept per position.
        temperature: what output vectors are divided by.
        norms: squared row norms of the unembedding; without them no ``delta`` and no ``spread`` are found.
    """

    head: Unembedding
    pipeline: Sequence[Processor]
    keep: int
    temperature: float
    norms: Float[Tensor, " v"] | None

    def tokens(
        self,
        hidden: Float[Tensor, "g d"],
        so_far: Int[Tensor, "g l"],
        *,
        of: Int[Tensor, " n"],
        uniform: Float[Tensor, " n"],
    ) -> dict[str, Tensor]:
        """One token for each of ``n`` rows, drawn at ``hidden[of[i]]``, and the columns of a trace that belong to it.

        Args:
            hidden: hidden states that predict the token; rows that share one are drawn from one distribution.
            so_far: the tokens before, for the processors.
            of: row of ``hidden`` that each draw belongs to.
            uniform: float64 numbers in 0..1, one per draw.
        """
        step = max(1, _ALIVE // self.head.vocabulary)
        if len(hidden) <= step:
            return self._block(hidden, so_far, of, uniform)
        parts, order = [], []
        for start in range(0, len(hidden), step):
            mine = ((of >= start) & (of < start + step)).nonzero()[:, 0]
            part = slice(start, start + step)
            parts.append(self._block(hidden[part], so_far[part], of[mine] - start, uniform[mine]))
            order.append(mine)
        back = torch.cat(order).argsort()
        return {name: torch.cat([part[name] for part in parts])[back] for name in parts[0]}

    def _block(self, hidden: Tensor, so_far: Tensor, of: Tensor, uniform: Tensor) -> dict[str, Tensor]:
        logits = self.head.logits(hidden)
        scores = logits
        for processor in self.pipeline:
            scores = processor(so_far, scores)
        mu = scores.softmax(-1)
        token = draw(mu, uniform, of=of)
        probs, candidates = likeliest(mu, self.keep)
        # summed over the tail itself: one minus the sum would lose everything below 1e-7
        leak = mu.scatter(1, candidates, 0.0).sum(-1)
        found = {
            "token": token,
            "logprob": mu[of, token].log(),
            "candidate_ids": torch.where(probs > 0, candidates, -1)[of],
            "candidate_probs": probs[of],
            "leak": leak[of],
        }
        if self.norms is not None:
            delta, spread = self.head.signal(mu, token, logits=logits, of=of, norms=self.norms)
            found |= {"delta": delta / self.temperature, "spread": spread[of] / self.temperature**2}
        return found


def generator_of(key: str) -> torch.Generator:
    """A generator on the CPU whose numbers depend on the key only."""
    digest = hashlib.sha256(key.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def shared_numbers(key: str, *, rows: slice, total: int) -> Callable[[int], Float[Tensor, " n"]]:
    """Uniform numbers that depend on a key and a row's place among all rows only, however these are split over ranks.

    Args:
        key: anything that tells this batch from others, such as seed and step.
        rows: the own rows among all.
        total: number of all rows.

    Returns:
        A function from the place of a token in its completion to float64 numbers, one for each own row.
    """

    def numbers(place: int) -> Tensor:
        generator = generator_of(f"{key}/{place}")
        return torch.rand(total, dtype=torch.float64, generator=generator)[rows]

    return numbers


def draw(
    mu: Float[Tensor, "g v"], uniform: Float[Tensor, " n"], *, of: Int[Tensor, " n"] | None = None
) -> Int[Tensor, " n"]:
    """One token per number by inverting the cumulative distribution; a token without mass is never drawn.

    The block of tokens is found first, then the token in its block, both in float64: one uniform number per draw and
    one pass over the vocabulary, several times faster on a CPU than ``multinomial``.

    Args:
        mu: distributions, up to a factor.
        uniform: float64 numbers in 0..1.
        of: distribution each number is for; None takes one number per distribution.

    Raises:
        ValueError: a distribution has no mass, or is not finite.
    """
    of = torch.arange(len(mu), device=mu.device) if of is None else of
    blocks = _blocks(mu, 0.0)
    share = blocks.sum(-1).double()
    total = share.cumsum(-1)[of]
    if not ((total[:, -1] > 0) & total[:, -1].isfinite()).all():
        raise ValueError("there is no distribution to draw from: the policy's logits are NaN or infinite. It diverged.")
    aim = uniform[:, None] * (1 - 2**-50) * total[:, -1:]
    block = torch.searchsorted(total, aim, right=True)
    inner = blocks[of, block[:, 0]].double().cumsum(-1)
    before = total.gather(1, block) - share[of].gather(1, block)
    # float32 sums of a block and its float64 sum differ in their last digits: stay within the block
    rest = ((aim - before) / share[of].gather(1, block)).clamp(0, 1 - 2**-50) * inner[:, -1:]
    return (block * _BLOCK + torch.searchsorted(inner, rest, right=True))[:, 0]


def likeliest(mu: Float[Tensor, "g v"], keep: int) -> tuple[Float[Tensor, "g k"], Int[Tensor, "g k"]]:
    """The ``keep`` largest probabilities and their tokens, largest first; ``topk`` by way of the best blocks."""
    blocks = _blocks(mu, -1.0)  # what fills up is never among the likeliest
    keep = min(keep, mu.shape[-1])
    best = blocks.amax(-1).topk(min(keep, blocks.shape[1])).indices
    inside = blocks.gather(1, best[..., None].expand(-1, -1, blocks.shape[-1])).flatten(1)
    probs, place = inside.topk(keep)
    return probs, best.gather(1, place // _BLOCK) * _BLOCK + place % _BLOCK


def _blocks(mu: Tensor, fill: float) -> Tensor:
    """``[g, b, block]``, the last block filled up with ``fill``."""
    short = -mu.shape[-1] % _BLOCK
    padded = torch.nn.functional.pad(mu, (0, short), value=fill) if short else mu
    return padded.unflatten(-1, (-1, _BLOCK))
