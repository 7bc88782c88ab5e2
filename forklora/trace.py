"""Sampled tokens with the sampler's sparse distribution at each position; saved and loaded as safetensors.

Decisions: a trace is checked once, where it is built, so that every room behind it may trust it; the mask comes from
lengths and never from token values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from forklora.archive import load_tensors, save_tensors


class _Layout(NamedTuple):
    axes: str
    dtype: torch.dtype | None  # None: any floating point
    padding: int = 0


_LAYOUT = {
    "prompt_ids": _Layout("NP", torch.int64),
    "prompt_mask": _Layout("NP", torch.bool),
    "completion_ids": _Layout("NT", torch.int64),
    "completion_mask": _Layout("NT", torch.bool),
    "candidate_ids": _Layout("NTK", torch.int64, padding=-1),
    "candidate_probs": _Layout("NTK", torch.float32),
    "leak": _Layout("NT", torch.float32),
    "logprob": _Layout("NT", torch.float32),
    "spread": _Layout("NT", torch.float32),
    "group": _Layout("N", torch.int64),
    "delta": _Layout("NTd", None),
    "reward": _Layout("N", torch.float32),
}
_OPTIONAL = ("spread", "delta", "reward")
# How far stored probabilities may be from a distribution: engines report them in low precision.
_TOLERANCE = 1e-3


@dataclass(frozen=True, eq=False)
class Trace:
    """Rollouts and what the sampler knew while it drew them: N rows, P prompt and T completion positions, K candidates.

    What stands where a mask is False means nothing and is never read.

    Attributes:
        prompt_ids: prompt tokens, left padded.
        prompt_mask: True at prompt tokens.
        completion_ids: drawn tokens, right padded.
        completion_mask: True at tokens the sampler drew; False at padding and at tokens put in by tools.
        candidate_ids: the sampler's likeliest tokens, likeliest first, each once; -1 in unused slots.
        candidate_probs: their probabilities ``mu``; 0 in unused slots.
        leak: sampler mass outside the stored candidates, 0..1.
        logprob: ``log mu`` of the drawn token, nats.
        group: the same number stands for the same prompt.
        spread: ``tr C_t = E|delta_t|^2``, over the whole distribution, or None.
        delta: backward signal ``w_y - sum_a mu(a) w_a``, or None.
        reward: reward of each row, or None.
        facts: what the distribution belongs to: temperature, top_p, vocabulary, model, ...

    Raises:
        ValueError: shapes, types or devices do not fit, or the numbers are no distribution the tokens were drawn from.
    """

    prompt_ids: Int64[Tensor, "N P"]
    prompt_mask: Bool[Tensor, "N P"]
    completion_ids: Int64[Tensor, "N T"]
    completion_mask: Bool[Tensor, "N T"]
    candidate_ids: Int64[Tensor, "N T K"]
    candidate_probs: Float32[Tensor, "N T K"]
    leak: Float32[Tensor, "N T"]
    logprob: Float32[Tensor, "N T"]
    group: Int64[Tensor, " N"]
    spread: Float32[Tensor, "N T"] | None = None
    delta: Float[Tensor, "N T d"] | None = None
    reward: Float32[Tensor, " N"] | None = None
    facts: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_layout(self)
        _check_rows(self)
        _check_positions(self)
        _prompt_of_group(self)

    def __len__(self) -> int:
        return len(self.group)

    def select(self, rows: Int64[Tensor, " n"] | Bool[Tensor, " N"] | Sequence[int]) -> Trace:
        """The trace of the given rows (indices, or a mask over rows), in the given order; padding stays."""
        index = torch.as_tensor(rows, device=self.group.device)
        index = index if index.dtype == torch.bool else index.long()
        return replace(self, **{name: value[index] for name, value in _tensors(self).items()})

    def without_delta(self) -> Trace:
        """The trace without its backward signal, which is most of its bytes."""
        return replace(self, delta=None)

    @staticmethod
    def concat(traces: Sequence[Trace]) -> Trace:
        """All rows in order, padded to the longest prompt, the longest completion and the most candidates.

        Groups stay together and apart: where a group number already stands for another prompt, all numbers of the later
        trace move past the largest one so far.

        Raises:
            ValueError: no traces, or traces that differ in facts, in the size of ``delta`` or in what they hold.
        """
        if not traces:
            raise ValueError("there is no trace to concatenate.")
        parts = [{**_tensors(t), "group": group} for t, group in zip(traces, _joined_groups(traces), strict=True)]
        _check_alike(traces, parts)
        widths = {axis: max(_sizes(part)[axis] for part in parts) for axis in "PTK"}
        return Trace(
            **{name: torch.cat([_padded(part, name, widths=widths) for part in parts]) for name in parts[0]},
            facts=dict(traces[0].facts),
        )

    def save(self, path: str | Path) -> None:
        """Write the trace to ``path`` (safetensors), whole or not at all; missing folders are made.

        Raises:
            OSError: the file cannot be written; what stood there before is untouched.
        """
        save_tensors(path, _tensors(self), kind="trace", facts=self.facts)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what :meth:`save` wrote, bit for bit, onto the CPU.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is cut short, damaged, no trace, or from a version with other fields.
        """
        tensors, facts = load_tensors(path, kind="trace")
        required = set(_LAYOUT) - set(_OPTIONAL)
        if not required <= tensors.keys() <= set(_LAYOUT):
            odd = sorted((required - tensors.keys()) | (tensors.keys() - set(_LAYOUT)))
            raise ValueError(f"{path} has missing or unknown fields {odd}: it comes from another version; sample anew.")
        return cls(**tensors, facts=facts)


def _tensors(trace: Trace) -> dict[str, Tensor]:
    values = {f.name: getattr(trace, f.name) for f in fields(trace) if f.name in _LAYOUT}
    return {name: value for name, value in values.items() if value is not None}


def _sizes(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Size of each axis, as the first field that has the axis states it."""
    sizes: dict[str, int] = {}
    for name, value in tensors.items():
        for axis, size in zip(_LAYOUT[name].axes, value.shape, strict=False):
            sizes.setdefault(axis, size)
    return sizes


def _check_layout(trace: Trace) -> None:
    tensors = _tensors(trace)
    sizes = _sizes(tensors)
    for name, value in tensors.items():
        axes, dtype, _ = _LAYOUT[name]
        if value.dtype != dtype if dtype else not value.is_floating_point():
            raise ValueError(f"{name} is {value.dtype}, but must be {dtype or 'floating point'}; convert it first.")
        if len(axes) != value.ndim or [sizes[axis] for axis in axes] != list(value.shape):
            known = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
            raise ValueError(f"{name} has shape {list(value.shape)}, but must be [{', '.join(axes)}] with {known}.")
    if len(devices := {value.device for value in tensors.values()}) > 1:
        raise ValueError(f"the fields lie on several devices, {sorted(map(str, devices))}; move them to one.")
    if any(not isinstance(text, str) for pair in trace.facts.items() for text in pair):
        raise ValueError(f"facts must map strings to strings; got {trace.facts}.")


def _check_rows(trace: Trace) -> None:
    mask = trace.prompt_mask
    if not (mask[:, 1:] >= mask[:, :-1]).all():
        raise ValueError("prompts must be left padded: in some row the mask turns False after a True.")
    if trace.reward is not None and not trace.reward.isfinite().all():
        raise ValueError("a reward is not finite; drop its row with select, or leave reward None.")


def _check_positions(trace: Trace) -> None:
    """Every rule at every drawn token; NaN keeps no rule."""
    ids, probs, leak = trace.candidate_ids, trace.candidate_probs, trace.leak
    ordered = ids.sort(-1).values
    is_drawn = ids == trace.completion_ids[..., None]
    drawn, listed = trace.logprob.exp(), (probs * is_drawn).sum(-1)
    rules = {
        "a drawn token has a negative id": trace.completion_ids >= 0,
        "leak is outside 0..1": (leak >= -_TOLERANCE) & (leak <= 1 + _TOLERANCE),
        "a candidate's probability is negative": (probs >= 0).all(-1),
        "an unused slot (id -1) has mass": ((ids >= 0) | (probs == 0)).all(-1),
        "candidates are not in descending order": (probs[..., 1:] <= probs[..., :-1]).all(-1),
        "a candidate stands twice": ((ordered[..., 1:] != ordered[..., :-1]) | (ordered[..., 1:] < 0)).all(-1),
        "candidates and leak do not add up to 1": (probs.sum(-1) + leak - 1).abs() <= _TOLERANCE,
        "logprob does not fit the stored distribution": torch.where(
            is_drawn.any(-1), (drawn - listed).abs() <= _TOLERANCE, drawn <= leak + _TOLERANCE
        ),
    }
    if trace.spread is not None:
        rules["spread is negative or not finite"] = (trace.spread >= 0) & trace.spread.isfinite()
    if trace.delta is not None:
        rules["delta is not finite"] = trace.delta.isfinite().all(-1)
    for fault, kept in rules.items():
        if (bad := trace.completion_mask & ~kept).any():
            row, position = bad.nonzero()[0].tolist()
            raise ValueError(f"{fault}: {int(bad.sum())} positions, the first in row {row} at position {position}.")


def _prompt_of_group(trace: Trace) -> dict[int, tuple[int, ...]]:
    """Prompt tokens of each group number; ValueError where one number stands for two prompts."""
    prompts: dict[int, tuple[int, ...]] = {}
    rows = zip(trace.group.tolist(), trace.prompt_ids.tolist(), trace.prompt_mask.tolist(), strict=True)
    for number, ids, mask in rows:
        prompt = tuple(compress(ids, mask))
        if prompts.setdefault(number, prompt) != prompt:
            raise ValueError(f"group {number} stands for two prompts; give each prompt a number of its own.")
    return prompts


def _joined_groups(traces: Sequence[Trace]) -> list[Int64[Tensor, " n"]]:
    prompts: dict[int, tuple[int, ...]] = {}
    groups = []
    for trace in traces:
        found = _prompt_of_group(trace)
        clash = any(prompts.get(number, prompt) != prompt for number, prompt in found.items())
        shift = max(prompts) + 1 - min(found) if clash else 0
        prompts |= {number + shift: prompt for number, prompt in found.items()}
        groups.append(trace.group + shift)
    return groups


def _check_alike(traces: Sequence[Trace], parts: Sequence[Mapping[str, Tensor]]) -> None:
    for trace, part in zip(traces, parts, strict=True):
        if trace.facts != traces[0].facts:
            raise ValueError(f"the traces differ in facts, {trace.facts} against {traces[0].facts}; make them agree.")
        if part.keys() != parts[0].keys():
            odd = sorted(part.keys() ^ parts[0].keys())
            raise ValueError(f"only some of the traces hold {' and '.join(odd)}; drop or add them everywhere.")
        if (size := _sizes(part).get("d")) != (first := _sizes(parts[0]).get("d")):
            raise ValueError(f"delta has {size} numbers in one trace and {first} in another: two different models.")


def _padded(tensors: Mapping[str, Tensor], name: str, *, widths: Mapping[str, int]) -> Tensor:
    """A field at the given axis sizes: prompts grow on the left, everything else on the right."""
    value, pads = tensors[name], []
    for axis, size in reversed(list(zip(_LAYOUT[name].axes, value.shape, strict=True))):
        missing = widths.get(axis, size) - size
        pads += [missing, 0] if axis == "P" else [0, missing]
    return torch.nn.functional.pad(value, pads, value=_LAYOUT[name].padding)
