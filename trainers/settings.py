"""``ForkGRPOConfig``: TRL's settings with a few more decisions; what contradicts the centered loss is refused."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field

import torch
from accelerate.utils import str_to_bool
from torch import nn
from trl import GRPOConfig

CENTERINGS = ("none", "sampler", "value")
_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")


@dataclass
class ForkGRPOConfig(GRPOConfig):
    """TRL's ``GRPOConfig`` with a few more decisions; everything else keeps its meaning.

    Attributes:
        score_centering: ``sampler`` subtracts the sampler's mean score exactly, from the recorded distribution;
            ``value`` subtracts from the signal its average at each prefix and needs no probabilities; ``none`` is
            TRL's loss.
        step_length: plain SGD whose every step moves the weights by this Frobenius length, all layers together; None
            leaves the optimizer to ``optim`` and ``learning_rate``.
        step_kl: no step moves the policy further than this KL divergence of the new one from the old, in nats per drawn
            token, as measured on a part of the step's rollouts before it is taken; with ``step_length=None`` every step
            moves it as far. A schedule lowers lengths: the divergence goes with the square.
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
    step_kl: float | None = field(default=None, metadata={"help": "Largest KL divergence of a step, nats, or None."})
    step_evenly: bool = field(default=True, metadata={"help": "Give every matrix the same share of the step's length."})
    basis_prompts: int = field(default=64, metadata={"help": "Prompts rolled out to find the forks."})
    basis_seed: int = field(default=0, metadata={"help": "Seed of the rollouts for the bases."})
    pass_tokens: int | None = field(
        default=None, metadata={"help": "Tokens in one forward and backward pass; bounds the memory of a step."}
    )

    def __post_init__(self) -> None:
        engine = bool(self.deepspeed) or bool(str_to_bool(os.environ.get("ACCELERATE_USE_DEEPSPEED", "false")))
        if engine and self.bf16 is None:
            self.bf16 = False  # the engine would cast the adapter as well; a model in bfloat16 stays in bfloat16
        if engine and self.stated:
            self.max_grad_norm = 0.0  # a step of stated size has nothing to clip
        super().__post_init__()
        if engine:
            self._refuse_engine()
        if self.score_centering not in CENTERINGS:
            raise ValueError(f"score_centering={self.score_centering!r} is not one of {', '.join(CENTERINGS)}.")
        self._refuse_sizes()
        if self.pass_tokens is not None and self.pass_tokens < 1:
            raise ValueError(f"pass_tokens={self.pass_tokens} must be at least 1, or None for the device's default.")
        if self.score_centering == "sampler":
            self._refuse()

    @property
    def stated(self) -> bool:
        """Whether steps have a stated size."""
        return self.step_length is not None or self.step_kl is not None

    @property
    def zero_stage(self) -> int | None:
        """Stage of DeepSpeed's ZeRO; None without DeepSpeed."""
        return None if self.deepspeed_plugin is None else int(self.deepspeed_plugin.zero_stage)

    def _refuse_sizes(self) -> None:
        for name in ("step_length", "step_kl"):
            size = getattr(self, name)
            if size is not None and not 0 < size < math.inf:
                raise ValueError(f"{name}={size} must be above 0, or None for optim={self.optim}.")

    def _refuse_engine(self) -> None:
        given = self.deepspeed_plugin.deepspeed_config
        if self.stated:
            given.setdefault("gradient_clipping", 0.0)  # DeepSpeed's own default is 1
        enabled = {name: (given.get(name) or {}).get("enabled") is True for name in ("bf16", "fp16")}
        narrow = [name for name, on in enabled.items() if on or getattr(self, name)]
        clipping = given.get("gradient_clipping")
        found = []
        if "optimizer" in given:
            found.append(
                "optimizer: DeepSpeed would build this one and drop the trainer's without a word; take the section out "
                "and choose by step_length or step_kl, or by step_length=None with optim and learning_rate"
            )
        if narrow:
            found.append(
                f"{narrow[0]}.enabled: the engine would cast the adapter too, and steps below its rounding would be "
                "lost; set bf16=False and fp16=False, and load the model itself in bfloat16 (model_init_kwargs="
                "{'dtype': 'bfloat16'}): products are as fast, and the adapter stays in float32"
            )
        if self.stated and isinstance(clipping, int | float) and clipping > 0:
            found.append(
                f"gradient_clipping={clipping}: a step of stated size is not to be shortened; set it to 'auto' or 0, "
                "or step_length=None and step_kl=None"
            )
        if self.zero_stage == 3 and self.score_centering == "sampler" and not self.ds3_gather_for_generation:
            found.append(
                "ds3_gather_for_generation=False: completions end at different times on different ranks, and weights "
                "in pieces need all of them at every token; leave it True"
            )
        if found:
            raise ValueError("this DeepSpeed configuration does not work here:\n" + "\n".join(f"  {f}" for f in found))

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


def refuse_narrow(trained: list[tuple[str, nn.Parameter]], args: ForkGRPOConfig) -> None:
    """Raise a ValueError where an adapter below float32 would be trained by plain SGD, which loses small steps."""
    narrow = [(n, p.dtype) for n, p in trained if ".lora_" in n and p.dtype in (torch.bfloat16, torch.float16)]
    if narrow and (args.stated or args.optim == "sgd"):
        raise ValueError(
            f"{len(narrow)} adapter tensors are {narrow[0][1]} (the first is {narrow[0][0]}): steps of plain SGD below "
            "its rounding would be lost. Make the adapter with autocast_adapter_dtype=True, or set step_length=None "
            "and an optimizer with a state, such as optim='adamw_torch'."
        )
