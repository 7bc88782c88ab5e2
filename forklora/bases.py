"""Turns a model and its rollouts into one output basis and one input basis per target layer, without any reward.

Decisions: every rollout gets a pseudo-advantage (random, mean zero in its group) and the trainer's own backward pass
is run on the centered loss; each layer's weight gradient ``G_i`` of rollout ``i`` goes into additive sketches of
``S = sum G_i G_i^T`` (output side) and ``H = sum G_i^T G_i`` (input side), without being formed. These hold more of a
held-out policy gradient than the sums over positions, ``sum g g^T`` and ``sum |g|^2 x x^T``, that suggest themselves.
Sums are kept, never d x d matrices. On several ranks each rolls out its own prompts, the sums of all are added up, and
rank 0 reads the eigenvectors for all of them. What is drawn for a prompt depends on the seed and on its place among the
prompts of all ranks, so that the bases do not depend on how many ranks there are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm.auto import tqdm

from forklora.archive import load_tensors, save_tensors
from forklora.backward import LayerSums, linear_layers, pseudo_advantages, residual_signal, residual_writers
from forklora.collective import all_or_none, from_first, rank, ranks, summed
from forklora.drawing import generator_of
from forklora.forks import find_forks
from forklora.gathering import callable_alone, fetched
from forklora.rollouts import Luck, Sampler, sample
from forklora.sketch import Sketch
from forklora.trace import Trace
from forklora.unembed import Unembedding, read_unembedding, unwrap

_NO_FORKS = (
    "no forks: at every position the sampler was sure of its token, so nothing flows back. Use other prompts, more of "
    "them, or a higher temperature."
)
_PARTS = ("output", "output_values", "input", "input_values")
Change = Callable[[Trace, Unembedding], Trace]


@dataclass(frozen=True)
class BasisConfig:
    """How bases are collected.

    Attributes:
        output: directions ``k`` kept on the output side.
        input: directions ``m`` kept on the input side.
        group: completions per prompt.
        batch: prompts per rollout and per backward pass.
        width: columns of each sketch; None takes ``max(32, 4 k)``.
        seed: of rollouts, pseudo-advantages and sketches; the global random state is left alone.
        layers: names of the target layers; None takes every linear layer but the head.
        progress: show a bar.
        fewer: where fewer directions of a layer carry energy keep those, instead of raising.
    """

    output: int = 16
    input: int = 16
    group: int = 8
    batch: int = 16
    width: int | None = None
    seed: int = 0
    layers: tuple[str, ...] | None = None
    progress: bool = True
    fewer: bool = False

    def __post_init__(self) -> None:
        if min(self.output, self.input, self.batch) < 1 or self.group < 2:
            raise ValueError(
                f"output={self.output}, input={self.input} and batch={self.batch} must be at least 1 and "
                f"group={self.group} at least 2: pseudo-advantages have mean zero within a group."
            )


@dataclass(frozen=True)
class LayerBasis:
    """Leading directions of one layer, orthonormal columns, strongest first.

    Attributes:
        output: ``U [d_out, k]``; output_values: eigenvalues of ``S``.
        input: ``Q [d_in, m]``; input_values: eigenvalues of ``H``.
        output_trace: trace of ``S``, all the energy of the layer's backward signal; input_trace: trace of ``H``.
    """

    output: Float[Tensor, "o k"]
    output_values: Float[Tensor, " k"]
    input: Float[Tensor, "i m"]
    input_values: Float[Tensor, " m"]
    output_trace: float
    input_trace: float


@dataclass(frozen=True)
class Bases(Mapping[str, LayerBasis]):
    """Bases of a model by layer name, with the facts of how they came about.

    Attributes:
        layers: layer name to its bases.
        facts: strings such as seed, rollouts, forks, model.
        spectrum: eigenvalues of the averaged covariance ``C`` of the output vectors, descending, or None.
    """

    layers: dict[str, LayerBasis]
    facts: dict[str, str] = field(default_factory=dict)
    spectrum: Float[Tensor, " n"] | None = None

    def __getitem__(self, name: str) -> LayerBasis:
        return self.layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file; it is complete or not there."""
        tensors: dict[str, Tensor] = {} if self.spectrum is None else {"spectrum": self.spectrum}
        for name, basis in self.layers.items():
            tensors.update({f"{name}:{part}": getattr(basis, part) for part in _PARTS})
            tensors[f"{name}:traces"] = torch.tensor([basis.output_trace, basis.input_trace], dtype=torch.float64)
        save_tensors(path, tensors, kind="bases", facts=self.facts)

    @classmethod
    def load(cls, path: str | Path) -> Bases:
        """Read what :meth:`save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is damaged or holds something else.
        """
        tensors, facts = load_tensors(path, kind="bases")
        spectrum = tensors.pop("spectrum", None)
        layers = {}
        for name in sorted({key.rpartition(":")[0] for key in tensors}):
            parts = {part: tensors[f"{name}:{part}"] for part in _PARTS}
            energy = tensors[f"{name}:traces"].tolist()
            layers[name] = LayerBasis(**parts, output_trace=energy[0], input_trace=energy[1])
        return cls(layers, facts, spectrum)


def collect_bases(
    model: nn.Module,
    tokenizer: Any,  # noqa: ANN401
    prompts: Sequence[Any],
    *,
    config: BasisConfig,
    sampler: Sampler,
    change: Change | None = None,
) -> Bases:
    """Roll out the model on the prompts, find its forks and build the bases of every target layer.

    Where a process group exists every rank must call this, with its own prompts (``prompts[rank::ranks]``) or none, and
    gets the same bases bit for bit: those of all rollouts together. Weights in pieces under ZeRO-3 are whole meanwhile:
    every rank holds the whole model, as it does in generation by TRL's default.

    Args:
        model: base model, bare or wrapped; its weights, gradients and mode are as before afterwards.
        tokenizer: encodes prompts that are strings or chat messages; token lists are taken as they are.
        prompts: what to complete on this rank; more prompts mean better bases.
        config: how many directions, which layers, which seed.
        sampler: the policy's own sampling settings.
        change: makes another trace of each one before it is summed, for bases of something else than the forks.

    Raises:
        ValueError: no forks on any rank, fewer directions than asked for, an unknown layer name, or a model whose
            weights an engine's hooks fetch layer by layer: ranks call it unequally often here.
        RuntimeError: another rank failed.
    """
    base = unwrap(model)  # a wrapper's own forward may be a collective
    if fetched(base):
        raise ValueError(
            "the model is in a ZeRO-3 engine already: collect bases before deepspeed.initialize, or load saved ones."
        )
    with all_or_none("collecting bases"), callable_alone(base):
        sums, counts = _roll_out(base, tokenizer, prompts, config=config, sampler=sampler, change=change)
    sums.all_reduce()
    facts = {name: summed(count) for name, count in counts.items()}
    if facts["forks"] == 0:
        raise ValueError(_NO_FORKS)
    facts |= {"seed": config.seed, "group": config.group}
    told, sizes = {k: str(v) for k, v in facts.items()}, {"output": config.output, "input": config.input}
    return from_first(lambda: read_bases(sums, facts=told, fewer=config.fewer, **sizes))


def _roll_out(
    model: nn.Module,
    tokenizer: Any,  # noqa: ANN401
    prompts: Sequence[Any],
    *,
    config: BasisConfig,
    sampler: Sampler,
    change: Change | None,
) -> tuple[LayerSums, dict[str, int]]:
    """Sums and counts of this rank's own rollouts."""
    head = read_unembedding(model, tokenizer)
    layers = linear_layers(model) if config.layers is None else list(config.layers)
    width = config.width or max(32, 4 * max(config.output, config.input))
    sums = LayerSums(model, layers, hidden=head.width, width=width, seed=config.seed)
    ids = [encode(tokenizer, p) for p in prompts]
    counts = {"rollouts": 0, "forks": 0, "prompts": len(ids)}
    starts = range(0, len(ids), config.batch)
    with seeded(config.seed):  # for processors of the sampler's own
        for i in tqdm(starts, desc="forks", unit="batch", disable=not config.progress, leave=False):
            chunk = ids[i : i + config.batch]
            places = [rank() + ranks() * j for j in range(i, i + len(chunk))]
            luck, advantages = drawn(places, group=config.group, length=sampler.max_new_tokens, seed=config.seed)
            trace = sample(model, chunk, sampler=sampler, group=config.group, unembedding=head, luck=luck)
            sums.add(model, trace if change is None else change(trace, head), advantages=advantages)
            counts["forks"] += len(find_forks(trace))
            counts["rollouts"] += len(trace)
    return sums, counts


def drawn(places: Sequence[int], *, group: int, length: int, seed: int) -> tuple[Luck, Float[Tensor, " n"]]:
    """Random numbers for the rollouts of prompts, and their pseudo-advantages, by each prompt's place among all.

    Args:
        places: of the prompts; nothing else of them counts.
        group: completions per prompt.
        length: longest completion.
        seed: of all.
    """
    numbers, draws = [], []
    for place in places:
        generator = generator_of(f"{seed}/{place}")
        numbers.append(torch.rand(group, length, dtype=torch.float64, generator=generator))
        draws.append(torch.randn(group, generator=generator))
    every = torch.cat(numbers)
    groups = torch.arange(len(places)).repeat_interleave(group)
    return lambda t: every[:, t], pseudo_advantages(groups, torch.cat(draws))


def read_bases(
    sums: LayerSums,
    *,
    output: int,
    input: int,  # noqa: A002
    facts: dict[str, str],
    fewer: bool = False,
) -> Bases:
    """Leading eigenvectors of all sums: ``output`` and ``input`` directions a layer, as many as its sizes allow.

    Raises:
        ValueError: nothing flowed back at all; or fewer directions carry energy than asked for, without ``fewer``.
    """
    if sums.signal.trace == 0:
        raise ValueError(_NO_FORKS)
    layers = {}
    for name, (out, in_) in sums.sides.items():
        k, m = min(output, out.size), min(input, in_.size)
        read = Sketch.leading if fewer else Sketch.eigenbasis
        try:
            (s, u), (eta, q) = read(out, k), read(in_, m)
        except ValueError as error:
            raise ValueError(
                f"layer {name}: {error} More prompts or rollouts give more directions; or ask for fewer "
                f"(output={k}, input={m})."
            ) from error
        layers[name] = LayerBasis(u, s, q, eta, float(out.trace), float(in_.trace))
    return Bases(layers, facts, sums.signal.spectrum(64) / max(sums.signal.count, 1))


def identity_span(model: nn.Module, traces: Sequence[Trace], *, output: int, seed: int = 0) -> dict[str, Tensor]:
    """The cheap basis: leading directions of the signal past the final norm, for all layers that write into the stream.

    Exact for the layer below the final norm, a poor guide further down (there only the carried span is right). No
    backward pass through the model. ``{layer: U [d, output]}``. Of weights in pieces every rank holds the whole
    meanwhile, and must call this.
    """
    head = read_unembedding(model, check=False)
    sketch = Sketch(head.width, width=min(head.width, max(64, 4 * output)), seed=seed)
    with callable_alone(unwrap(model)):
        for trace in traces:
            sketch.add(residual_signal(model, trace))
    _, basis = sketch.eigenbasis(output)
    return {name: basis for name in residual_writers(model, head.width)}


def encode(tokenizer: Any, prompt: Any, **settings: Any) -> list[int]:  # noqa: ANN401
    """Token ids of a prompt: a string, a list of chat messages (``settings`` go to its template), or ids already."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    if len(prompt) > 0 and isinstance(prompt[0], dict):
        return list(
            tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True, **settings)["input_ids"]
        )
    return [int(i) for i in prompt]


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within the block torch draws from ``seed``; the random states of all devices are put back."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
