"""Reads how a model turns hidden states into logits: rows, bias, scale, soft cap, tied or not, real ids.

Decisions: the head is found through ``get_output_embeddings()`` under any wrapper and never copied; scale and soft cap
come from the configuration under every name they have there; whatever was read is checked against the model's own
logits on a few real tokens, and refused when it differs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from forklora.gathering import callable_alone, whole

# Name in a configuration, and whether the logits are divided by it instead of multiplied.
_SCALES = {"logit_scale": False, "lm_head_multiplier": False, "output_multiplier": False, "logits_scaling": True}
_CAPS = ("final_logit_softcapping", "logit_softcapping", "output_logit_soft_cap")
_CHUNK = 1 << 21  # numbers of the unembedding widened to float32 at a time


def unwrap(model: nn.Module) -> Any:  # noqa: ANN401 - a causal language model of whatever library
    """The model below DDP, DeepSpeed, FSDP and PEFT wrappers: the first one that has ``get_output_embeddings``."""
    seen: Any = model
    while not _owns_head(seen) and isinstance(getattr(seen, "module", None), nn.Module):
        seen = seen.module
    base = getattr(seen, "get_base_model", None)
    return base() if callable(base) else seen


def _owns_head(model: nn.Module) -> bool:
    """Whether a model itself tells its head; DeepSpeed's engine hands on whatever it is asked for."""
    name = "get_output_embeddings"
    return callable(getattr(type(model), name, None)) or callable(vars(model).get(name))


def output_head(model: nn.Module) -> Any:  # noqa: ANN401 - a module with weight, and bias or none
    """The module that maps hidden states to logits.

    Raises:
        ValueError: the model has no output embedding, or the head carries an adapter or a trained copy (a basis built
            from its rows would go stale with the first step).
    """
    base = unwrap(model)
    getter = getattr(base, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    if head is None:
        raise ValueError(
            f"{type(base).__name__} has no output embedding: get_output_embeddings() gives nothing. "
            "Pass a causal language model (AutoModelForCausalLM) or give the class a get_output_embeddings() method."
        )
    for mark, what in (
        ("base_layer", "carries an adapter"),
        ("modules_to_save", "is a trained copy (modules_to_save)"),
        ("token_adapter", "has trained rows (trainable_token_indices)"),
    ):
        if hasattr(head, mark):
            raise ValueError(
                f"the unembedding of {type(base).__name__} {what}: its rows change while training and the fork basis "
                "would go stale. Leave the head out of target_modules, modules_to_save and trainable_token_indices."
            )
    return head


@contextlib.contextmanager
def hidden_only(model: nn.Module) -> Iterator[list[Tensor]]:
    """Within the block, every forward hands its head input ``[.., d]`` to the yielded list and computes no logits.

    The wrapper (DDP, DeepSpeed) is still the one that is called, so its hooks run; only the head's own product with
    the vocabulary is skipped. The input is taken before hooks of the head can touch it: ZeRO-3 would otherwise wait for
    a backward pass through the head. The head is as it was afterwards, on errors too.
    """
    head = output_head(model)
    before = head.__dict__.get("forward")
    caught: list[Tensor] = []

    def nothing(hidden: Tensor, *_: object, **__: object) -> Tensor:
        return hidden[..., :0]

    watch = head.register_forward_pre_hook(lambda _, args: caught.append(args[0]), prepend=True)
    head.forward = nothing
    try:
        yield caught
    finally:
        watch.remove()
        del head.forward
        if before is not None:
            head.forward = before


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Within the block the model is in evaluation mode; every module's own mode is put back, on errors too."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@dataclass(frozen=True)
class Unembedding:
    """The map ``h -> logits = cap(scale * (W h + b))`` of one model, read in place.

    Attributes:
        head: the module whose ``weight [V, d]`` holds the rows.
        scale: factor on every logit.
        soft_cap: ``c`` of ``c * tanh(z / c)``, or None.
        tied: the rows are also the input embedding (same storage).
        valid_ids: ``[v]`` ids the tokenizer knows whose row is finite and not zero; only these may create directions.
    """

    head: Any
    scale: float
    soft_cap: float | None
    tied: bool
    valid_ids: Int[Tensor, " v"]

    @property
    def weight(self) -> Tensor:
        """The rows ``[V, d]`` as the model stores them (partitioned under ZeRO-3)."""
        return self.head.weight

    @property
    def width(self) -> int:
        """Size ``d`` of a hidden state."""
        return int(getattr(self.weight, "ds_shape", self.weight.shape)[1])

    @property
    def vocabulary(self) -> int:
        """Number of rows ``V``."""
        return int(getattr(self.weight, "ds_shape", self.weight.shape)[0])

    def logits(self, hidden: Float[Tensor, "*n d"]) -> Float[Tensor, "*n v"]:
        """Float32 logits, equal to the model's own: ``[.., d] -> [.., V]``."""
        bias = getattr(self.head, "bias", None)
        with whole(self.weight, bias):
            raw = nn.functional.linear(hidden.to(self.weight.dtype), self.weight, bias).float()
        raw = raw if self.scale == 1.0 else raw * self.scale
        return raw if self.soft_cap is None else self.soft_cap * torch.tanh(raw / self.soft_cap)

    def rows(self, ids: Int[Tensor, " n"]) -> Float[Tensor, "n d"]:
        """Output vectors of tokens, float32 ``[n, d]``: ``d logit_a / d h`` below the soft cap, so row times scale."""
        with whole(self.weight):
            return self.weight.detach()[ids.to(self.weight.device)].float() * self.scale

    def squared_norms(self) -> Float[Tensor, " v"]:
        """``|w_a|^2`` of every token below the soft cap, float32."""
        with whole(self.weight):
            return _squared_norms(self.weight.detach()) * self.scale**2

    def signal(
        self,
        probabilities: Float[Tensor, "g v"],
        tokens: Int[Tensor, " n"],
        *,
        logits: Float[Tensor, "g v"],
        of: Int[Tensor, " n"] | None = None,
        norms: Float[Tensor, " v"] | None = None,
    ) -> tuple[Float[Tensor, "n d"], Float[Tensor, " g"]]:
        """Backward signal and its expected squared length, exactly, under the sampler's distribution.

        ``delta = w_y - sum_a mu(a) w_a`` and ``tr C = sum_a mu(a) |w_a|^2 - |sum_a mu(a) w_a|^2`` ("Low-rank in hidden
        space", section 1), with ``w_a`` the derivative of logit ``a`` by the hidden state: row, scale, slope of the
        cap.

        Both are computed from differences to the likeliest token's vector, so that they stay accurate where the
        sampler is sure and everything cancels.

        Args:
            probabilities: ``mu`` ``[g, V]``, float32, what the tokens were really drawn from.
            tokens: the drawn tokens ``[n]``.
            logits: the model's own logits ``[g, V]`` there (read for the cap's slope only).
            of: row of ``probabilities`` that each token was drawn from; None takes one token per row.
            norms: what :meth:`squared_norms` gives, if it is at hand.
        """
        slope = None if self.soft_cap is None else 1 - (logits / self.soft_cap) ** 2
        of = torch.arange(len(tokens), device=tokens.device) if of is None else of
        norms = self.squared_norms() if norms is None else norms
        top = probabilities.argmax(-1, keepdim=True)
        rest = probabilities.scatter(-1, top, 0.0)
        others = rest if slope is None else rest * slope
        with whole(self.weight):
            weight = self.weight.detach()

            def vector(ids: Tensor, rows: Tensor | slice) -> Tensor:
                row = weight[ids].float() * self.scale
                return row if slope is None else row * slope[rows].gather(-1, ids[:, None])

            best, drawn = vector(top[:, 0], slice(None)), vector(tokens, of)
            pull = (others.to(weight.dtype) @ weight).float() * self.scale
        left = rest.sum(-1, keepdim=True)
        # mean - w_top = sum over the others of mu(a) (w_a - w_top); the same for the second moment about w_top
        shift = pull - left * best
        second = (others if slope is None else others * slope) @ norms
        about_top = second - 2 * (pull * best).sum(-1) + left[:, 0] * best.square().sum(-1)
        spread = about_top - shift.square().sum(-1)
        return drawn - best[of] - shift[of], spread.clamp_min(0)


def _squared_norms(weight: Tensor) -> Tensor:
    step = max(1, _CHUNK // weight.shape[1])  # blocks that stay in a processor's cache
    return torch.cat([weight[i : i + step].float().square().sum(-1) for i in range(0, len(weight), step)])


def read_unembedding(model: nn.Module, tokenizer: Any = None, *, check: bool = True) -> Unembedding:  # noqa: ANN401
    """Read the head of a causal language model, and check it against the model's own logits.

    Args:
        model: the model, bare or wrapped (PeftModel, DDP, DeepSpeedEngine).
        tokenizer: tells how many rows are real tokens; None takes every finite, nonzero row.
        check: run the model once on eight tokens and compare. Under ZeRO-3 every rank must call this.

    Raises:
        ValueError: no output embedding, an adapted one, or logits that are not ``cap(scale (W h + b))``.
    """
    head, base = output_head(model), unwrap(model)
    config = base.config.get_text_config() if hasattr(base.config, "get_text_config") else base.config
    weight = head.weight
    with whole(weight):
        norms = _squared_norms(weight.detach())
        known = len(tokenizer) if tokenizer is not None else len(norms)
        valid = ((norms > 0) & norms.isfinite() & (torch.arange(len(norms), device=norms.device) < known)).nonzero()
    source = base.get_input_embeddings()
    found = Unembedding(
        head=head,
        scale=_scale(config),
        soft_cap=next((float(c) for name in _CAPS if (c := getattr(config, name, None))), None),
        tied=source is not None and getattr(source, "weight", None) is weight,
        valid_ids=valid[:, 0].cpu(),
    )
    if check:
        _compare(model, found)
    return found


def _scale(config: object) -> float:
    scale = 1.0
    for name, divides in _SCALES.items():
        value = getattr(config, name, None)
        if isinstance(value, int | float):
            scale = scale / value if divides else scale * value
    return scale


@torch.no_grad()
def _compare(model: nn.Module, found: Unembedding) -> None:
    ids = found.valid_ids[torch.linspace(0, len(found.valid_ids) - 1, 8).long()].to(found.weight.device)[None]
    caught: list[Tensor] = []
    watch = found.head.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    try:
        with evaluation_mode(model), callable_alone(unwrap(model)):
            theirs = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.float()
    finally:
        watch.remove()
    ours = found.logits(caught[-1])
    close = 1e-4 if found.weight.dtype == torch.float32 else 0.02
    gap, size = (ours - theirs).abs().max().item(), theirs.abs().max().item()
    if not math.isfinite(gap) or gap > close * max(size, 1e-6):
        raise ValueError(
            f"the logits of {type(unwrap(model)).__name__} are not soft_cap(scale * (W h + b)) with scale="
            f"{found.scale} and soft_cap={found.soft_cap}: on eight tokens they differ by {gap:.3g} (largest logit "
            f"{size:.3g}). The configuration hides a scale, a cap or a norm behind the head that is not known here."
        )
