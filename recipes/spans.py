"""The span of a model's forks and the span carried down to every layer, from a task's rollouts or from saved ones.

Decisions: no reward is used; the rollouts of a task are drawn from a seed of their own, in batches; a trace that was
saved without its backward signal is refused, since the candidates it stores need not hold all of the sampler's mass.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from forklora.recipes.measure_plan import MeasurePlan
from forklora.recipes.opening import Opened, opened
from forklora.recipes.refusal import Refusal
from forklora.recipes.subject import Subject
from torch import Tensor, nn
from tqdm.auto import tqdm

from forklora.backward import LayerSums, linear_layers, pseudo_advantages
from forklora.bases import Bases, identity_span, read_bases, seeded
from forklora.rollouts import sample
from forklora.trace import Trace
from forklora.unembed import read_unembedding

_BATCH = 16  # prompts completed together
_SPAN = 4  # traces that the identity path is read from


@dataclass(frozen=True)
class Spans:
    """What flows back at the forks of a model.

    Attributes:
        bases: of the carried span, for every linear layer.
        identity: the span itself, for layers that write into the residual stream.
        transposed: layers whose weight is stored as ``[d_in, d_out]``.
    """

    bases: Bases
    identity: dict[str, Tensor]
    transposed: frozenset[str]


def rollouts(found: Opened, subject: Subject) -> list[Trace]:
    """Completions of a subject's prompts, with the sampler's distribution and the backward signal, batch by batch."""
    head, traces = read_unembedding(found.model, found.tokenizer), []
    with seeded(subject.seed):
        for i in tqdm(range(0, len(found.prompts), _BATCH), desc="rollouts", unit="batch", leave=False):
            chunk = found.prompts[i : i + _BATCH]
            traces.append(sample(found.model, chunk, sampler=found.sampler, group=subject.group, unembedding=head))
    return traces


def read_spans(plan: MeasurePlan) -> Spans | None:
    """The spans of the plan's task or trace; None where it names neither.

    Raises:
        Refusal: the base cannot be loaded, the trace is not one of it, or nothing flows back in its rollouts.
    """
    if plan.task is not None:
        found = opened(plan.subject)
        return _spans(found.model, rollouts(found, plan.subject), plan=plan)
    if plan.trace is None:
        return None
    from forklora.recipes.demo import load_model

    try:
        trace = Trace.load(Path(plan.trace))
    except ValueError as error:
        raise Refusal(f"{plan.trace} cannot be read as rollouts: {error}") from error
    if trace.delta is None:
        raise Refusal(f"{plan.trace} holds no backward signal; `forklora forks` writes one into its trace.safetensors")
    model, _ = load_model(plan.base, "bfloat16")
    head = read_unembedding(model, check=False)
    largest = int(max(trace.prompt_ids.max(), trace.completion_ids.max()))
    if trace.delta.shape[-1] != head.width or largest >= len(head.weight):
        raise Refusal(
            f"{plan.trace} is not of this model: its signal has {trace.delta.shape[-1]} numbers and its largest token "
            f"is {largest}; the model has {head.width} and {len(head.weight)} tokens"
        )
    groups = trace.group.unique(return_counts=True)
    if int(groups[1].min()) < 2:  # noqa: PLR2004 - one rollout has no other to be held against
        raise Refusal(f"{plan.trace} has a prompt with one completion; `forklora forks ... group=8` draws more of each")
    parts = [trace.select(torch.isin(trace.group, part)) for part in groups[0].split(_BATCH)]
    return _spans(model, parts, plan=plan)


def _spans(model: nn.Module, traces: list[Trace], *, plan: MeasurePlan) -> Spans:
    head = read_unembedding(model, check=False)
    sums = LayerSums(model, linear_layers(model), hidden=head.width, width=4 * plan.top, seed=plan.seed)
    with seeded(plan.seed):
        for trace in tqdm(traces, desc="carried span", unit="batch", leave=False):
            sums.add(model, trace, advantages=pseudo_advantages(trace.group))
    facts = {"rollouts": str(sum(len(trace) for trace in traces)), "seed": str(plan.seed)}
    try:
        bases = read_bases(sums, output=plan.top, input=plan.top, facts=facts, fewer=True)
        identity = identity_span(model, traces[:_SPAN], output=plan.top)
    except ValueError as error:
        raise Refusal(f"no span can be read from these rollouts: {error}") from error
    transposed = {name for name, module in model.named_modules() if type(module).__name__ == "Conv1D"}
    return Spans(bases, identity, frozenset(transposed))
