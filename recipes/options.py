"""The groups of options that recipes and comparisons are made of: closed, typed, each option described once.

The description is the string under the field: errors and help texts are made from it (wording.py).
"""

from typing import Annotated, Any, Literal, Self

from forklora.recipes.tasks import Task, task
from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(ge=1)]
FORK_KINDS = ("span", "core", "inputs", "block")


class Closed(BaseModel):
    """A group of options: no other keys, no silent conversion, no later change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class ModelSpec(Closed):
    """Which model is trained."""

    name: str = "smollm2-135m"
    """The demo model `smollm2-135m`, a folder, or a Hugging Face hub id."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Precision of the frozen weights."""


class TaskSpec(Closed):
    """Which questions are asked."""

    name: str
    """Name of the task, such as `multiplication` or `reasoning_gym`."""
    options: dict[str, Any] = {}
    """The task's own options."""

    def build(self) -> Task:
        """The task itself. Raises TaskError where name or options do not exist."""
        return task(self.name, **self.options)


class SamplingSpec(Closed):
    """How completions are drawn."""

    max_new_tokens: Positive | None = None
    """Longest completion in tokens; null takes what the task states."""
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Divides the logits before sampling."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with this much probability; 1 is all of them."""
    top_k: int = Field(0, ge=0)
    """Sample from this many likeliest tokens; 0 is all of them."""
    min_p: float | None = Field(None, ge=0, lt=1)
    """Drop tokens less likely than this share of the likeliest; null drops none."""
    stop: list[str] | None = None
    """Strings that end a completion; null takes what the task states."""


class EvaluationSpec(Closed):
    """How held-out accuracy is measured."""

    every: Positive = 2
    """Steps between two evaluations; the first and the last step are always evaluated."""
    prompts: Positive = 128
    """Held-out prompts."""
    samples: Positive = 4
    """Completions of each."""
    split: Literal["validation", "test"] = "validation"
    """Held-out questions asked: those that rates are chosen by, or those that are reported."""


class ForkSpec(Closed):
    """Where the bases of the fork adapters come from."""

    prompts: Positive = 64
    """Training prompts whose rollouts, without any reward, the bases are read from."""
    seed: int = 0
    """Seed of those prompts, of their rollouts and of the pseudo-advantages."""
    task: TaskSpec | None = None
    """Task whose forks they are; null is the recipe's own."""
    signal: Literal["forks", "shuffled", "confident"] = "forks"
    """What flows back: that of the forks; with tokens exchanged for random others; or that of confident positions."""
    kept_in: str | None = Field(None, min_length=1)
    """Folder that keeps bases for other runs, 16 directions a side; null collects anew, as many as an arm needs."""


class ArmSpec(Closed):
    """One adapter with its optimizer, without the rate."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name in tables, and of the arm's folder."""
    adapter: Literal["lora", "span", "core", "inputs", "block", "tinylora", "full"]
    """Plain LoRA, a kind of fork adapter, TinyLoRA, or the target layers' own weights."""
    rank: Positive = 1
    """Rank of the update; for `block`, the number of input directions."""
    width: Positive | None = None
    """Output directions of `core` and `block`, or trained numbers of a layer of `tinylora`; null leaves it to them."""
    alpha: float | None = Field(None, gt=0, allow_inf_nan=False)
    """The update is scaled by alpha / rank; null means alpha = rank, a scale of one."""
    init: Literal["default", "gaussian", "pissa", "olora", "orthogonal", "mica", "eva", "lora_ga"] = "default"
    """How PEFT starts the factors of `lora`."""
    basis: Literal["forks", "random", "singular", "minor"] = "forks"
    """Basis of a fork adapter: its forks, random, or the weight's own largest or smallest singular vectors."""
    forks: ForkSpec | None = None
    """Where this arm's forks come from; null is what the recipe says."""
    layers: Positive | None = None
    """Adapt only so many of the target layers, those whose forks hold most energy; null adapts all."""
    tying: float = Field(0.0, ge=0, le=1)
    """For `tinylora`: share of the layers that have no numbers of their own."""
    optimizer: Literal["adamw", "sgd", "length", "kl"] = "length"
    """`length` and `kl` are SGD whose every step moves the weights by the Frobenius length `rate`, or the policy by
    `rate`: the root of twice its KL divergence in nats per token."""
    brake: float | None = Field(None, gt=0, allow_inf_nan=False)
    """For `length`: no step moves the policy further than this: the root of twice its KL divergence, nats per token."""
    evenly: bool = True
    """For `length` and `kl`: every matrix moves equally far; false lets each move as its gradient says."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate goes over the steps: it stays, or falls to zero at the last one."""
    centering: Literal["none", "sampler", "value"] = "sampler"
    """What is subtracted from the score (`sampler`) or from the signal (`value`)."""
    train_basis: bool = False
    """Also train the basis: the forks are then only its starting point."""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """`all-linear`, or a list of the names of the layers that get an adapter."""
    reward: Literal["task", "random"] = "task"
    """What is learned from: the task's reward, or coins that know nothing of the completion."""
    base_prompts: Positive | None = None
    """Train offline, on rollouts of the base model for so many prompts, again and again; null samples the policy."""
    top_entropy: float = Field(1.0, gt=0, le=1)
    """For centering `none`: share of the positions, those of highest entropy, that are learned from."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        fork = self.adapter in FORK_KINDS
        if self.width is not None and self.adapter not in ("core", "block", "tinylora"):
            raise ValueError(f"width is for the adapters core, block and tinylora; {self.adapter!r} has none")
        mine = {
            "train_basis": (self.train_basis, fork, "fork adapters"),
            "basis": (self.basis != "forks", fork, "fork adapters"),
            "forks": (self.forks is not None, fork and self.basis == "forks", "fork adapters with the basis forks"),
            "layers": (self.layers is not None, fork, "fork adapters"),
            "init": (self.init != "default", self.adapter == "lora", "the adapter lora"),
            "brake": (self.brake is not None, self.optimizer == "length", "the optimizer length"),
            "tying": (self.tying > 0, self.adapter == "tinylora", "the adapter tinylora"),
            "top_entropy": (self.top_entropy < 1, self.centering == "none", "centering none"),
        }
        for option, (given, allowed, whose) in mine.items():
            if given and not allowed:
                raise ValueError(f"{option} is for {whose}; {self.adapter!r} has none")
        return self


class Arm(ArmSpec):
    """One adapter with its optimizer; the arms of a recipe share everything else."""

    rate: float = Field(gt=0, allow_inf_nan=False)
    """Learning rate, or the length of a step."""


class OutcomeSpec(Closed):
    """What is measured of a trained policy besides its accuracy."""

    samples: Positive = 8
    """Completions of each held-out prompt for pass@k; k goes from 1 to this number by doubling."""
    kl_prompts: Positive = 32
    """Held-out prompts on whose completions the divergence from the base model is measured."""
    untrained: TaskSpec | None = None
    """A task that is not trained on, for what is forgotten; null asks none."""


class PartSpec(Closed):
    """Which place of a comparison a run has."""

    grid: str
    """Name of the comparison."""
    task: str
    """Its name for the task."""
    round: str
    """`trial1`, `trial2`, ... where rates are chosen, `report` where results are reported."""
