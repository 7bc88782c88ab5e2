"""A callback for any Trainer that measures how far forks and bases have moved since training began.

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
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from forklora.bases import Bases, BasisConfig, collect_bases
from forklora.collective import from_first, rank, ranks
from forklora.measure import principal_angles
from forklora.rollouts import Sampler

_DEFAULT = BasisConfig(output=4, input=4, progress=False)


class DriftCallback(TrainerCallback):
    """Logs every few steps how far the bases of a policy's forks have turned since the first step.

    ``curve`` holds a point for each look: ``step``, and in degrees the mean principal angle between the leading
    directions then and at the start, averaged over the layers, ``output_degrees`` and ``input_degrees``; the largest of
    any layer's means, ``output_degrees_most`` and ``input_degrees_most``; and ``forks``, how many were found. ``noise``
    holds the same between two looks at the untrained policy. Points also join the trainer's log history.

    Args:
        tokenizer: encodes prompts that are no token ids.
        prompts: what is completed at each look, the same on every rank; more of them mean less noise.
        sampler: the policy's own sampling settings.
        every: steps between two looks.
        folder: where ``drift.json`` and the first bases go, for a run that is resumed; None writes nothing.
        collect: directions, layers, seed and group of a look.
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
    ) -> None:
        if every < 1 or not prompts:
            raise ValueError(f"every={every} must be 1 or more, and there must be prompts; got {len(prompts)}.")
        self.tokenizer, self.prompts, self.sampler = tokenizer, list(prompts), sampler
        self.every, self.collect = every, collect
        self.folder = None if folder is None else Path(folder)
        self.curve: list[dict[str, float]] = []
        self.noise: dict[str, float] = {}
        self.first: Bases | None = None

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
        self.noise = turned(self.first, self._look(model, replace(self.collect, seed=self.collect.seed + 1)))
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

    def _look(self, model: nn.Module, config: BasisConfig) -> Bases:
        mine = self.prompts[rank() :: ranks()]
        return collect_bases(model, self.tokenizer, mine, config=config, sampler=self.sampler)

    def _keep(self, state: TrainerState, found: Bases) -> None:
        assert self.first is not None
        point = {"step": float(state.global_step), **turned(self.first, found), "forks": float(found.facts["forks"])}
        self.curve.append(point)
        logged = {f"drift/{key}": value for key, value in point.items() if key != "step"}
        state.log_history.append({**logged, "step": state.global_step})
        if self.folder is not None and rank() == 0:
            self.first.save(self.folder / "first.safetensors")
            content = json.dumps({"noise": self.noise, "curve": self.curve}, indent=2)
            partial = self.folder / f".drift.{os.getpid()}.partial"
            partial.write_text(content + "\n", encoding="utf-8")
            partial.replace(self.folder / "drift.json")

    def _resumed(self, step: int) -> bool:
        """Take up the curve of the run that is resumed, up to its step; False where it kept none."""
        if self.folder is None or not (self.folder / "drift.json").exists():
            return False
        folder = self.folder
        self.first = from_first(lambda: Bases.load(folder / "first.safetensors"))
        kept = from_first(lambda: json.loads((folder / "drift.json").read_text(encoding="utf-8")))
        self.noise, self.curve = kept["noise"], [point for point in kept["curve"] if point["step"] <= step]
        return True


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
