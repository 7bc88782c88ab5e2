"""One side of a benchmark in a process of its own: builds its trainer, then takes a step whenever it is told to.

Decisions: both sides see the same prompts, rewards and row counts, differ in their trainer, adapter and optimizer only,
and TRL runs in its faster precision (bf16 autocast on a bfloat16 model). Ours gets random orthonormal bases: a step
costs the same whatever the directions are, and collecting real ones is a cost paid once that is no part of a step.

    python -m forklora.recipes.bench_side SPEC_JSON FOLDER DESCRIPTOR

Each line on stdin means "go"; the answer is one JSON line on the open file DESCRIPTOR, so whatever libraries print is
not in the way. The process ends as soon as stdin is closed, in the middle of a step too: it cannot outlive its parent.
"""

import hashlib
import json
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from forklora.recipes.bench_inputs import exact_prompts, hashed_reward, policy
from forklora.recipes.bench_plan import SPARE_STEPS, Shape, SideSpec
from forklora.trainers.bridge import ClockedGRPOTrainer, peak_memory
from forklora.trainers.rl import ForkGRPOTrainer
from forklora.trainers.settings import ForkGRPOConfig
from peft import LoraConfig
from torch import Tensor, nn
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from forklora.adapter import ForkLoraConfig, target_layers
from forklora.backward import layer_shape

SHORTEST = 0.99  # of the length asked for
_MEMORY = "memory/peak_mib"


def main(spec_json: str, folder: str, *, descriptor: int) -> None:
    """Build the trainer and step until the parent closes stdin."""
    parent = Parent(descriptor)
    spec = SideSpec.model_validate_json(spec_json)
    model, tokenizer = policy(spec)
    count = spec.shape.prompts * (spec.repeats + SPARE_STEPS)
    prompts = exact_prompts(tokenizer, length=spec.shape.prompt, count=count, seed=spec.seed)
    trainer = build_trainer(spec, Path(folder), model=model, tokenizer=tokenizer, prompts=prompts)
    digest = hashlib.sha256("\0".join(prompts).encode()).hexdigest()
    trainer.add_callback(Paced(spec.shape, parent, greeting={"prompts": digest, "ready_mib": round(peak_memory(), 1)}))
    trainer.train()


def build_trainer(spec: SideSpec, folder: Path, *, model: nn.Module, tokenizer: Any, prompts: list[str]) -> GRPOTrainer:  # noqa: ANN401
    """The trainer of a side, which will take the prompts in their order."""
    shape = spec.shape
    options = {
        "per_device_train_batch_size": shape.rows,
        "gradient_accumulation_steps": shape.accumulation,
        "num_generations": shape.group,
        "max_completion_length": shape.completion,
        "max_steps": len(prompts) // shape.prompts,
        "gradient_checkpointing": False,
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        "beta": 0.0,
        "temperature": 1.0,
        "optim": "adamw_torch",
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "shuffle_dataset": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": not torch.cuda.is_available(),
        "disable_tqdm": True,
        "seed": spec.seed,
    }
    given = {
        "reward_funcs": hashed_reward(spec.seed),
        "train_dataset": Dataset.from_dict({"prompt": prompts}),
        "processing_class": tokenizer,
    }
    if spec.side == "trl":
        args = GRPOConfig(str(folder), bf16=spec.model.dtype == "bfloat16", **options)
        return ClockedGRPOTrainer(model, args=args, peft_config=LoraConfig(r=1, target_modules="all-linear"), **given)
    adapter = ForkLoraConfig(kind="span", r=1, bases=random_bases(model, seed=spec.seed))
    args = ForkGRPOConfig(str(folder), bf16=False, **options)
    return ForkGRPOTrainer(model, args=args, peft_config=adapter, **given)


def random_bases(model: nn.Module, *, seed: int) -> dict[str, Tensor]:
    """One random unit output direction ``[d_out, 1]`` for each layer that gets an adapter."""
    modules, generator = dict(model.named_modules()), torch.Generator().manual_seed(seed)
    names = target_layers(model, ForkLoraConfig(kind="span", r=1))
    drawn = {name: torch.randn(layer_shape(modules[name])[0], 1, generator=generator) for name in names}
    return {name: vector / vector.norm() for name, vector in drawn.items()}


class Parent:
    """The process that started this one: it is waited for, and answered."""

    def __init__(self, descriptor: int) -> None:
        self._answers = os.fdopen(descriptor, "w", encoding="utf-8")
        self._going: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            self._going.put(line)
        os._exit(1)

    def wait(self) -> None:
        """Return when the parent says go."""
        self._going.get()

    def answer(self, content: dict[str, Any]) -> None:
        """Send one object."""
        self._answers.write(json.dumps(content) + "\n")
        self._answers.flush()


class Paced(TrainerCallback):
    """Holds each step until the parent says go, and answers with what the step took."""

    def __init__(self, shape: Shape, parent: Parent, *, greeting: dict[str, Any]) -> None:
        self.shape, self.parent, self.greeting = shape, parent, greeting
        self.begin = self.seconds = 0.0

    def on_step_begin(self, *_: object, **__: object) -> None:
        """Say hello before the first step; wait for the go before each."""
        if self.greeting:
            self.parent.answer(self.greeting)
            self.greeting = {}
        self.parent.wait()
        self.begin = _now()

    def on_step_end(self, *_: object, **__: object) -> None:
        """The step is over, optimizer included."""
        self.seconds = _now() - self.begin

    def on_log(self, *_: object, logs: dict[str, float], **__: object) -> None:
        """Answer with the step that is logged; a completion that ended early makes the figures worthless."""
        if "loss" in logs:
            self.parent.answer(step_figures(logs, seconds=self.seconds, asked=self.shape.completion))


def step_figures(logs: dict[str, float], *, seconds: float, asked: int) -> dict[str, float | None]:
    """What is kept of a step: seconds in all and by phase (update: all but sampling and scoring), memory, length.

    Raises:
        ValueError: the completions are shorter on average than 99 % of what was asked for.
    """
    length, sampling, scoring = logs["completions/mean_length"], logs["seconds/sampling"], logs["seconds/scoring"]
    if length < SHORTEST * asked:
        raise ValueError(f"completions have {length:.4g} tokens on average, not {asked}: some ended early")
    return {
        "seconds": seconds,
        "sampling": sampling,
        "scoring": scoring,
        "update": seconds - sampling - scoring,
        "peak_mib": logs[_MEMORY],
        "mean_length": length,
        "carrying_rows": logs.get("forks/carrying_rows"),
    }


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main(*sys.argv[1:3], descriptor=int(sys.argv[3]))
