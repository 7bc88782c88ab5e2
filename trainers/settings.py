"""``ForkGRPOConfig``: TRL's settings with a few more decisions; what contradicts the centered loss is refused."""

from __future__ import annotations

from dataclasses import dataclass, field

from trl import GRPOConfig

CENTERINGS = ("none", "sampler", "value")
_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")


@dataclass
class ForkGRPOConfig(GRPOConfig):
    """TRL's ``GRPOConfig`` with four more decisions; everything else keeps its meaning.

    Attributes:
        score_centering: ``sampler`` subtracts the sampler's mean score exactly, from the recorded distribution;
            ``value`` subtracts from the signal its average at each prefix and needs no probabilities; ``none`` is
            TRL's loss.
        step_length: plain SGD whose every step moves the weights by this Frobenius length, all layers together; None
            leaves the optimizer to ``optim`` and ``learning_rate``.
        step_evenly: give every matrix the same share of that length; else each moves as its gradient says.
        basis_prompts: prompts of the training set rolled out for the bases when the adapter brings none.
        basis_seed: of these rollouts.
        pass_tokens: tokens that go through the model in one forward and backward pass; a batch takes as many passes as
            it needs and its gradient does not depend on it. None: 1,024 on a CPU, 16,384 on an accelerator.
    """

    gradient_checkpointing: bool = field(
        default=False, metadata={"help": "Checkpointing runs prompts once per row instead of once per group."}
    )
    score_centering: str = field(default="sampler", metadata={"help": "sampler, value or none."})
    step_length: float | None = field(default=0.1, metadata={"help": "Frobenius length of each SGD step, or None."})
    step_evenly: bool = field(default=True, metadata={"help": "Give every matrix the same share of the step's length."})
    basis_prompts: int = field(default=64, metadata={"help": "Prompts rolled out to find the forks."})
    basis_seed: int = field(default=0, metadata={"help": "Seed of the rollouts for the bases."})
    pass_tokens: int | None = field(
        default=None, metadata={"help": "Tokens in one forward and backward pass; bounds the memory of a step."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.score_centering not in CENTERINGS:
            raise ValueError(f"score_centering={self.score_centering!r} is not one of {', '.join(CENTERINGS)}.")
        if self.step_length is not None and not self.step_length > 0:
            raise ValueError(f"step_length={self.step_length} must be above 0, or None for optim={self.optim}.")
        if self.pass_tokens is not None and self.pass_tokens < 1:
            raise ValueError(f"pass_tokens={self.pass_tokens} must be at least 1, or None for the device's default.")
        if self.score_centering == "sampler":
            self._refuse()

    def _refuse(self) -> None:
        every = self.steps_per_generation * self.num_iterations
        contradictions = {
            "use_vllm": (self.use_vllm, "the engine does not report the whole distribution it draws from"),
            "use_transformers_continuous_batching": (
                self.use_transformers_continuous_batching,
                "it does not report the distribution it draws from",
            ),
            "loss_type": (self.loss_type not in _LOSSES, f"the centered loss has no ratio; use one of {_LOSSES}"),
            "num_iterations or steps_per_generation": (
                self.gradient_accumulation_steps % every != 0,
                "the centered loss is unbounded and has no brake for several updates on the same rollouts",
            ),
            "beta": (self.beta != 0.0, "the KL term needs the policy's softmax over the vocabulary"),
            "delta": (self.delta is not None, "there is no ratio to clip"),
            "importance_sampling_level": (self.importance_sampling_level != "token", "there is no ratio"),
            "top_entropy_quantile": (self.top_entropy_quantile != 1.0, "entropies are not computed"),
            "entropy_coef": (self.entropy_coef != 0.0, "entropies are not computed"),
            "use_adaptive_entropy": (self.use_adaptive_entropy, "entropies are not computed"),
            "off_policy_mask_threshold": (self.off_policy_mask_threshold is not None, "there is no ratio"),
            "cache_implementation": (self.cache_implementation is not None, "the prompt's cache is shared and grows"),
            "generation_kwargs": (bool(set(self.generation_kwargs or {}) - {"stop_strings"}), "only stop_strings"),
        }
        found = [f"{name} ({why})" for name, (bad, why) in contradictions.items() if bad]
        if found:
            raise ValueError(
                f"score_centering='sampler' does not go with {'; '.join(found)}. Take it out, or use "
                "score_centering='none' (TRL's own loss) or 'value'."
            )
