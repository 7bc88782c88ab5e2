"""Trains one arm of a recipe in a process of its own, and writes its record.

Decisions: all arms see the same prompts in the same order, the same sampler and the same held-out prompts; rewards are
centered per group and not scaled, the loss is Dr. GRPO's; seconds count initialization and training, not evaluation;
the record appears when the arm has ended, complete, also when it failed.

    python -m forklora.recipes.arm RECIPE.json ARM
"""

import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from forklora.recipes.config import Arm, Recipe
from forklora.recipes.demo import load_model
from forklora.recipes.evaluate import Examiner
from forklora.recipes.files import write_json
from forklora.recipes.peft_arms import adapter_config
from forklora.recipes.provenance import hash_logits, hash_tensors, provenance
from forklora.recipes.tasks import Task
from forklora.trainers.rl import ForkGRPOConfig, ForkGRPOTrainer
from torch import nn
from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed

from forklora.export import save_plain_lora


def main(recipe_file: str, arm_name: str) -> None:
    """Train the named arm of the recipe in the file; a failure is recorded and raised again."""
    recipe = Recipe.model_validate_json(Path(recipe_file).read_text())
    arm = next(a for a in recipe.arms if a.name == arm_name)
    record: dict[str, Any] = {"arm": arm.name, "task": recipe.task.name, "seed": recipe.seed, "error": None}
    record |= {"recipe": recipe.model_dump(mode="json"), **provenance()}
    folder = Path(recipe.output) / arm.name
    try:
        record |= {"status": "done", **train_arm(recipe, arm, folder=folder)}
    finally:
        error = sys.exc_info()[1]
        if error is not None:
            stopped = isinstance(error, KeyboardInterrupt)
            record |= {"status": "interrupted" if stopped else "failed", "error": f"{type(error).__name__}: {error}"}
        write_json(folder / "record.json", record)


def train_arm(recipe: Recipe, arm: Arm, *, folder: Path) -> dict[str, Any]:
    """Everything an arm does; returns the measured part of its record."""
    task = recipe.task.build()
    set_seed(recipe.seed)
    model, tokenizer = load_model(recipe.model.name, recipe.model.dtype)
    base_hash = hash_tensors(model)
    start = time.perf_counter()
    trainer = build_trainer(recipe, arm, folder=folder, task=task, model=model, tokenizer=tokenizer)
    spent = time.perf_counter() - start
    examiner = Examiner(recipe, task, tokenizer=tokenizer)
    examiner.map_forks(trainer.model, folder / "trace")
    first = hash_logits(trainer.model, examiner.prompts[0])
    rollouts = 0 if trainer.bases is None else int(trainer.bases.facts["rollouts"])
    watch = Watch(recipe, arm, examiner=examiner, init_seconds=spent, init_rollouts=rollouts)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(watch)
    if recipe.steps:
        trainer.train()
    else:  # max_steps=0 would mean no limit
        watch.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
    adapter = save_plain_lora(trainer.model, folder / "adapter")
    if hash_tensors(trainer.model) != base_hash:
        raise RuntimeError("the base weights changed while the adapter was trained: the record would be worthless.")
    return watch.figures() | {
        "trained_parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "adapter_bytes": (adapter / "adapter_model.safetensors").stat().st_size,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "step0_hash": first,
        "base_hash": base_hash,
        "spectrum": None if trainer.bases is None else trainer.bases.spectrum.tolist(),
    }


def build_trainer(
    recipe: Recipe,
    arm: Arm,
    *,
    folder: Path,
    task: Task,
    model: nn.Module,
    tokenizer: Any,  # noqa: ANN401
) -> ForkGRPOTrainer:
    """The trainer of an arm; for a fork adapter this collects the bases."""
    questions = task.examples(max(recipe.steps, 1) * recipe.prompts, seed=recipe.seed, split="train")
    rows = Dataset.from_list([{"prompt": e.prompt, "answer": e.answer} for e in questions])

    def reward(completions: list[str], answer: list[str], **_: object) -> list[float]:
        return [task.score(c, a) for c, a in zip(completions, answer, strict=True)]

    fixed = arm.optimizer == "length"
    args = ForkGRPOConfig(
        str(folder),
        per_device_train_batch_size=recipe.prompts * recipe.group,
        num_generations=recipe.group,
        max_completion_length=recipe.sampling.max_new_tokens,
        max_steps=recipe.steps,
        temperature=recipe.sampling.temperature,
        top_p=recipe.sampling.top_p,
        top_k=recipe.sampling.top_k,
        min_p=recipe.sampling.min_p,
        generation_kwargs={"stop_strings": list(recipe.sampling.stop or [])},
        score_centering=arm.centering,
        step_length=arm.rate if fixed else None,
        step_evenly=arm.evenly,
        learning_rate=arm.rate,
        optim="sgd" if arm.optimizer == "sgd" else "adamw_torch",
        lr_scheduler_type=arm.schedule,
        weight_decay=0.0,
        loss_type="dr_grpo",
        scale_rewards="none",
        basis_prompts=recipe.forks.prompts,
        basis_seed=recipe.forks.seed,
        seed=recipe.seed,
        shuffle_dataset=False,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    return ForkGRPOTrainer(
        model, reward, args, train_dataset=rows, processing_class=tokenizer, peft_config=adapter_config(arm)
    )


class Watch(TrainerCallback):
    """Measures held-out accuracy on its way, keeps the curve and shows one bar."""

    def __init__(
        self, recipe: Recipe, arm: Arm, *, examiner: Examiner, init_seconds: float, init_rollouts: int
    ) -> None:
        self.recipe, self.examiner = recipe, examiner
        self.init_seconds, self.init_rollouts = init_seconds, init_rollouts
        self.training_seconds, self.since = 0.0, 0.0
        self.curve: list[dict[str, Any]] = []
        self.bar = tqdm(total=recipe.steps, desc=arm.name, unit="step")

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Accuracy before the first step."""
        self._point(0, kwargs["model"], None)
        self.since = time.perf_counter()

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """After every step: the reward of its rollouts, and accuracy where it is due."""
        if "reward" not in logs:
            return
        self.training_seconds += time.perf_counter() - self.since
        step, every = state.global_step, self.recipe.evaluation.every
        due = step % every == 0 or step == self.recipe.steps
        self._point(step, kwargs["model"] if due else None, logs["reward"])
        self.bar.update(1)
        self.since = time.perf_counter()

    def _point(self, step: int, model: nn.Module | None, reward: float | None) -> None:
        accuracy = None if model is None else self.examiner.accuracy(model)
        self.curve.append(
            {
                "step": step,
                "rollouts": self.init_rollouts + step * self.recipe.prompts * self.recipe.group,
                "seconds": round(self.init_seconds + self.training_seconds, 3),
                "train_reward": reward,
                "eval_reward": accuracy,
            }
        )
        shown = {k: v for k, v in (("reward", reward), ("held-out", accuracy)) if v is not None}
        self.bar.set_postfix({k: f"{v:.3f}" for k, v in shown.items()})

    def figures(self) -> dict[str, Any]:
        """The record's curve and what follows from it."""
        self.bar.close()
        seen = [p for p in self.curve if p["eval_reward"] is not None]
        target = self.recipe.target
        hit = next((p for p in seen if target is not None and p["eval_reward"] >= target), None)
        return {
            "curve": self.curve,
            "init_seconds": self.init_seconds,
            "evaluation_seconds": self.examiner.seconds,
            "target": target,
            "steps_to_target": hit and hit["step"],
            "rollouts_to_target": hit and hit["rollouts"],
            "seconds_to_target": hit and hit["seconds"],
            "eval_reward_start": seen[0]["eval_reward"],
            "eval_reward_final": seen[-1]["eval_reward"],
        }


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ValueError as error:  # a setting that turned out impossible: its message says all there is to know
        sys.exit(f"forklora: arm {sys.argv[2]}: {error}")
