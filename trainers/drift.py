"""A callback for any Trainer that measures how far forks, bases and large coordinates have moved since it began.

Decisions: every look completes the same prompts with the same random numbers, so that two looks differ by the policy
alone; how far apart two looks at one policy are, with other random numbers, is measured once and stands beside the
curve; nothing of the training is moved, neither weights and gradients nor modes and random states.

    drift = DriftCallback(tokenizer, prompts, sampler=Sampler(max_new_tokens=64), every=10, folder="drift")
    trainer.add_callback(drift)
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from forklora.archive import load_tensors, save_tensors
from forklora.backward import residual_signal
from forklora.bases import Bases, BasisConfig, collect_bases
from forklora.collective import from_first, rank, ranks
from forklora.fisher import FisherSums, membership, top_coordinates
from forklora.measure import principal_angles
from forklora.rollouts import Sampler
from forklora.sketch import Sketch
from forklora.trace import Trace
from forklora.unembed import Unembedding, evaluation_mode, read_unembedding

_KIND = "first look"
_DEFAULT = BasisConfig(output=4, input=4, progress=False)


@dataclass(frozen=True)
class Look:
    """A policy at one moment.

    Attributes:
        bases: of every layer.
        span: leading directions ``[d, k]`` of the signal past the final norm.
        top: largest coordinates of the Fisher, flat indices by layer; None where they were not asked for.
    """

    bases: Bases
    span: Tensor
    top: dict[str, Tensor] | None

    def save(self, folder: Path) -> None:
        """Write it as two files, each of them complete or not there."""
        self.bases.save(folder / "first.safetensors")
        tensors = {"span": self.span} | {f"top:{name}": index for name, index in (self.top or {}).items()}
        save_tensors(folder / "first-span.safetensors", tensors, kind=_KIND, facts={"top": str(self.top is not None)})

    @classmethod
    def load(cls, folder: Path) -> Look:
        """Read what :meth:`save` wrote."""
        tensors, facts = load_tensors(folder / "first-span.safetensors", kind=_KIND)
        span = tensors.pop("span")
        top = {name.removeprefix("top:"): index for name, index in tensors.items()}
        return cls(Bases.load(folder / "first.safetensors"), span, top if facts["top"] == "True" else None)


class DriftCallback(TrainerCallback):
    """Logs every few steps how far the bases of a policy's forks have turned since the first step.

    ``curve`` holds a point for each look: ``step``, and in degrees the mean principal angle between the leading
    directions then and at the start, averaged over the layers, ``output_degrees`` and ``input_degrees``; the largest of
    any layer's means, ``output_degrees_most`` and ``input_degrees_most``; ``span_degrees``, the same of the span past
    the final norm; ``top_kept``, the share of the largest coordinates of the Fisher that are among the largest still,
    where ``share`` is given; and ``forks``, how many were found. ``noise`` holds the same between two looks at the
    untrained policy. Points also join the trainer's log history.

    Args:
        tokenizer: encodes prompts that are no token ids.
        prompts: what is completed at each look, the same on every rank; more of them mean less noise.
        sampler: the policy's own sampling settings.
        every: steps between two looks.
        folder: where ``drift.json`` and the first bases go, for a run that is resumed; None writes nothing.
        collect: directions, layers, seed and group of a look.
        share: of all coordinates that count as the largest, such as 0.01; then every completion of a look goes through
            the model alone, and three float32 numbers are held for each weight of the layers meanwhile.
    """

    def __init__(
        self,
        tokenizer: Any,  # noqa: ANN401
        prompts: Sequence[Any],
        *,
        sampler: Sampler,
        every: int = 10,
        folder: str | Path | None = None,
        collect: BasisConfig = _DEFAULT,
        share: float | None = None,
    ) -> None:
        if every < 1 or not prompts:
            raise ValueError(f"every={every} must be 1 or more, and there must be prompts; got {len(prompts)}.")
        self.tokenizer, self.prompts, self.sampler = tokenizer, list(prompts), sampler
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"share={share} must lie above 0 and at most at 1.")
        self.every, self.collect, self.share = every, collect, share
        self.folder = None if folder is None else Path(folder)
        self.curve: list[dict[str, float]] = []
        self.noise: dict[str, float] = {}
        self.first: Look | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """The look that later ones are held against: that of the untrained policy, also where training resumes."""
        if model is None:
            raise ValueError("the trainer handed over no model to look at.")
        if state.global_step > 0 and self._resumed(state.global_step):
            return
        self.first = self._look(model, self.collect)
        self.noise = moved(self.first, self._look(model, replace(self.collect, seed=self.collect.seed + 1)))
        if self.folder is not None and rank() == 0:
            self.first.save(self.folder)
        self._keep(state, self.first)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """A look where one is due."""
        if state.global_step % self.every == 0 and model is not None:
            self._keep(state, self._look(model, self.collect))

    def _look(self, model: nn.Module, config: BasisConfig) -> Look:
        traces: list[Trace] = []

        def keep(trace: Trace, _: Unembedding) -> Trace:
            traces.append(trace)
            return trace

        mine = self.prompts[rank() :: ranks()]
        bases = collect_bases(model, self.tokenizer, mine, config=config, sampler=self.sampler, change=keep)
        with evaluation_mode(model):
            return Look(bases, self._span(model, traces), self._top(model, traces, layers=list(bases)))

    def _span(self, model: nn.Module, traces: list[Trace]) -> Tensor:
        width = read_unembedding(model, check=False).width
        sketch = Sketch(width, width=min(width, max(64, 4 * self.collect.output)), seed=self.collect.seed)
        for trace in traces:
            sketch.add(residual_signal(model, trace))
        sketch.all_reduce()
        return from_first(lambda: sketch.leading(self.collect.output)[1])

    def _top(self, model: nn.Module, traces: list[Trace], *, layers: list[str]) -> dict[str, Tensor] | None:
        if self.share is None:
            return None
        sums, share = FisherSums(model, layers), self.share
        for trace in traces:
            sums.add(model, trace, advantages=torch.zeros(len(trace)))
        sums.all_reduce()
        return from_first(lambda: top_coordinates({name: sums.fisher(name) for name in sums.layers}, share=share))

    def _keep(self, state: TrainerState, found: Look) -> None:
        assert self.first is not None
        forks = float(found.bases.facts["forks"])
        point = {"step": float(state.global_step), **moved(self.first, found), "forks": forks}
        self.curve.append(point)
        logged = {f"drift/{key}": value for key, value in point.items() if key != "step"}
        state.log_history.append({**logged, "step": state.global_step})
        if self.folder is not None and rank() == 0:
            content = json.dumps({"noise": self.noise, "curve": self.curve}, indent=2)
            partial = self.folder / f".drift.{os.getpid()}.partial"
            partial.write_text(content + "\n", encoding="utf-8")
            partial.replace(self.folder / "drift.json")

    def _resumed(self, step: int) -> bool:
        """Take up the curve of the run that is resumed, up to its step; False where it kept none."""
        if self.folder is None or not (self.folder / "drift.json").exists():
            return False
        folder = self.folder
        self.first = from_first(lambda: Look.load(folder))
        if (self.first.top is None) != (self.share is None):
            raise ValueError(f"{folder} holds a curve {_with(self.first.top)} largest coordinates: set share as there.")
        kept = from_first(lambda: json.loads((folder / "drift.json").read_text(encoding="utf-8")))
        self.noise, self.curve = kept["noise"], [point for point in kept["curve"] if point["step"] <= step]
        return True


def _with(top: object) -> str:
    return "without" if top is None else "with"


def moved(before: Look, after: Look) -> dict[str, float]:
    """How far a policy has moved between two looks: what a point of the curve holds."""
    found = turned(before.bases, after.bases)
    found["span_degrees"] = float(principal_angles(before.span, after.span).mean())
    if before.top is not None and after.top is not None:
        found["top_kept"] = membership(before.top, after.top)
    return found


def turned(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """How far bases have turned: mean principal angle of each layer, in degrees, averaged and the most of any layer.

    Layers are those of ``before``; where a layer has fewer directions than before, only as many are compared.

    Raises:
        ValueError: a layer of ``before`` is missing in ``after``, or none has directions on both sides.
    """
    if missing := sorted(set(before) - set(after)):
        raise ValueError(f"{len(missing)} layers have no bases any more, such as {missing[0]}.")
    found: dict[str, float] = {}
    for side in ("output", "input"):
        pairs = [(getattr(before[name], side), getattr(after[name], side)) for name in before]
        angles = [float(principal_angles(a, b).mean()) for a, b in pairs if _both(a, b)]
        if not angles:
            raise ValueError(f"no layer has {side} directions both before and after.")
        found |= {f"{side}_degrees": sum(angles) / len(angles), f"{side}_degrees_most": max(angles)}
    return found


def _both(a: Tensor, b: Tensor) -> bool:
    return bool(torch.any(a != 0) and torch.any(b != 0))
