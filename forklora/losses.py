"""Score-centered policy loss and its relatives: pure functions of tensors, no model, no trainer.

The centered score is ``c_t = kappa_y - sum_a mu(a) kappa_a``, the gradient of ``z_y - sum_a mu(a) z_a``. It has mean
zero under the sampler for any policy ("The gradient is a covariance", section 5). None of these losses contains the
current policy's softmax, and all are unbounded in the logits: nothing in them stops repeated steps on one batch.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

TAILS = ("exact", "proportional", "dropped")


def signal_loss(
    hidden: Float[Tensor, "n t d"], delta: Float[Tensor, "n t d"], *, advantages: Float[Tensor, " n #t"]
) -> Float[Tensor, "n t"]:
    """Centered loss per token from the recorded backward signal: ``L = -A <delta, h>``, without the vocabulary.

    Equal to :func:`dense_loss` in value (up to the head's bias) and gradient wherever logits are linear in ``h``.

    Args:
        hidden: hidden states that predict each token, with gradient.
        delta: ``w_y - sum_a mu(a) w_a`` recorded when the token was drawn.
        advantages: learning signal per token, or per row as ``[n, 1]``.
    """
    return -advantages * (hidden.float() * delta.float()).sum(-1)


def dense_loss(
    logits: Float[Tensor, "n t v"],
    tokens: Int[Tensor, "n t"],
    *,
    sampler: Float[Tensor, "n t v"],
    advantages: Float[Tensor, " n #t"],
) -> Float[Tensor, "n t"]:
    """Centered loss per token from whole logits: ``L = -A (z_y - sum_a mu(a) z_a)``. The oracle of the others.

    Args:
        logits: the trained policy's logits, already divided by the temperature; -inf where a token is forbidden.
        tokens: the drawn tokens.
        sampler: the distribution ``mu`` they were drawn from.
        advantages: learning signal per token, or per row as ``[n, 1]``.
    """
    drawn = logits.gather(-1, tokens[..., None])[..., 0]
    weighed = torch.where(sampler > 0, sampler * logits, 0.0)  # 0 * -inf is nothing, not NaN
    return -advantages * (drawn - weighed.sum(-1))


def centering_weights(
    head_probs: Float[Tensor, "n t k"], head_logprobs: Float[Tensor, "n t k"], *, tail: str
) -> Float[Tensor, "n t k"]:
    """Coefficients ``b_k`` of ``grad log p(k)`` to subtract when only the sampler's likeliest tokens are known.

    The centered gradient is ``grad log p(y) - sum_k b_k grad log p(k)``.

    - ``exact``: the head holds all the mass, ``b = q``; refused otherwise.
    - ``dropped``: the missing tail is ignored, ``b = q``; the leak ``1 - sum q`` stays as bias.
    - ``proportional``: outside the head the sampler is modelled as ``rho p`` with ``rho = (1 - sum q) / (1 - sum
      p)``, so ``b = q - rho p`` (arXiv 2609.20807). Without truncation and ``q = p`` it is zero: plain REINFORCE.

    Args:
        head_probs: the sampler's probabilities ``q`` of its likeliest tokens, 0 in unused slots.
        head_logprobs: the trained policy's log-probabilities of the same tokens, any value in unused slots.
        tail: one of ``exact``, ``proportional``, ``dropped``.
    """
    if tail not in TAILS:
        raise ValueError(f"tail={tail!r} is not one of {', '.join(TAILS)}.")
    missing = 1 - head_probs.sum(-1, keepdim=True)
    if tail == "exact" and bool((missing > 1e-4).any()):
        raise ValueError(
            f"tail='exact' but the recorded tokens leave up to {missing.max():.3g} of the sampler's mass out: "
            "record the whole distribution, or choose 'proportional' or 'dropped'."
        )
    if tail != "proportional":
        return head_probs
    policy = torch.where(head_probs > 0, head_logprobs.exp(), 0.0).detach()
    outside = (1 - policy.sum(-1, keepdim=True)).clamp_min(torch.finfo(policy.dtype).eps)
    return torch.where(head_probs > 0, head_probs - missing.clamp_min(0) / outside * policy, 0.0)


def prefix_value(
    advantages: Float[Tensor, " n"],
    tokens: Int[Tensor, "n t"],
    *,
    mask: Bool[Tensor, "n t"],
    group: Int[Tensor, " n"],
) -> Float[Tensor, "n t"]:
    """Average signal at each prefix, from the other rollouts of the group that share it: ``V(s_t) [n, t]``.

    Subtracting it from the signal centers the update in expectation without any probability ("The gradient is a
    covariance", section 5). A row is left out of its own average, so the baseline does not depend on the token it is
    used for. A prefix that no other rollout shares gets 0.

    Args:
        advantages: one signal per rollout.
        tokens: completions, right padded.
        mask: true at the completion's own tokens.
        group: equal numbers for rollouts of one prompt.
    """
    value = torch.zeros(tokens.shape, dtype=advantages.dtype, device=advantages.device)
    prefix = group
    for t in range(tokens.shape[1]):
        alive = mask[:, t]
        _, prefix = torch.unique(prefix, return_inverse=True)
        count = torch.zeros_like(advantages).scatter_add(0, prefix, alive.to(advantages.dtype))[prefix]
        total = torch.zeros_like(advantages).scatter_add(0, prefix, advantages * alive)[prefix]
        shared = alive & (count > 1)
        value[:, t] = torch.where(shared, (total - advantages) / (count - 1).clamp_min(1), 0.0)
        prefix = torch.unique(torch.stack([prefix, tokens[:, t]], 1), dim=0, return_inverse=True)[1]
    return value


def per_batch(
    per_token: Float[Tensor, "n t"], mask: Bool[Tensor, "n t"], *, kind: str, longest: int, items: float | Tensor
) -> Float[Tensor, ""]:
    """One number from per-token losses, in TRL's four normalizations.

    ``grpo``: mean over rows of each row's mean; ``bnpo``: mean over the batch's tokens; ``dr_grpo``: sum over rows
        times
    ``longest``; ``dapo``: sum over ``items``. Rows that were skipped because they carry nothing must still be counted:
    pass them as rows of zeros.

    Args:
        per_token: losses, 0 or anything finite where the mask is false.
        mask: tokens that count.
        kind: name of the normalization.
        longest: longest completion allowed (``dr_grpo``).
        items: tokens of the whole accumulation window on this rank (``dapo``).
    """
    total = torch.where(mask, per_token, 0.0)
    if kind == "grpo":
        return (total.sum(-1) / mask.sum(-1).clamp_min(1)).mean()
    if kind == "bnpo":
        return total.sum() / mask.sum().clamp_min(1)
    if kind == "dr_grpo":
        return total.sum() / (mask.shape[0] * longest)
    if kind == "dapo":
        return total.sum() / items
    raise ValueError(f"kind={kind!r} is not one of grpo, bnpo, dr_grpo, dapo.")
