"""Trains one arm of a recipe in processes of its own, one per rank, and writes its record.

Decisions: all arms see the same prompts in the same order, the same sampler and the same held-out prompts; rewards are
centered per group and not scaled, the loss is Dr. GRPO's; seconds count initialization and training, not evaluation;
the record appears when the arm has ended, complete, also when it failed. Rank 0 writes it after the last collective; of
ranks that fail the first one does, because the others then fail only for want of it.

    python -m forklora.recipes.arm RECIPE.json ARM
"""

import logging
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from forklora.recipes.config import Recipe
from forklora.recipes.demo import load_model
from forklora.recipes.evaluate import Examiner
from forklora.recipes.files import write_json
from forklora.recipes.options import Arm
from forklora.recipes.peft_arms import adapter_config
from forklora.recipes.provenance import hash_logits, hash_tensors, provenance
from forklora.recipes.ranks import gathered, this_rank
from forklora.recipes.tasks import Task
from forklora.recipes.zero import deepspeed_path, deepspeed_settings
from forklora.trainers.rl import ForkGRPOConfig, ForkGRPOTrainer
from torch import nn
from tqdm.auto import tqdm
from transformers import (
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from trl.models import unwrap_model_for_generation

from forklora.export import save_plain_lora


def main(recipe_file: str, arm_name: str) -> None:
    """Train the named arm of the recipe in the file; a failure is recorded and raised again."""
    recipe = Recipe.model_validate_json(Path(recipe_file).read_text())
    arm = next(a for a in recipe.arms if a.name == arm_name)
    record: dict[str, Any] = {"arm": arm.name, "task": recipe.task.name, "seed": recipe.seed, "error": None}
    record |= {"ranks": recipe.ranks, "deepspeed": deepspeed_settings(recipe.deepspeed)}
    record |= {"recipe": recipe.model_dump(mode="json"), **provenance()}
    folder = Path(recipe.output) / arm.name
    file, rank = folder / "record.json", this_rank()
    try:
        record |= {"status": "done", **train_arm(recipe, arm, folder=folder)}
    finally:
        error = sys.exc_info()[1]
        mine = rank == 0
        if error is not None:
            stopped = isinstance(error, KeyboardInterrupt)
            text = f"{'' if recipe.ranks == 1 else f'rank {rank}: '}{type(error).__name__}: {error}"
            record |= {"status": "interrupted" if stopped else "failed", "error": text}
            mine = recipe.ranks == 1 or not file.exists()
        if mine:
            write_json(file, record)


def train_arm(recipe: Recipe, arm: Arm, *, folder: Path) -> dict[str, Any]:
    """Everything an arm does; returns the measured part of its record."""
    task = recipe.task.build()
    set_seed(recipe.seed)
    model, tokenizer = load_model(recipe.model.name, recipe.model.dtype)
    base_hash = hash_tensors(model)
    start = time.perf_counter()
    trainer = build_trainer(recipe, arm, folder=folder, task=task, model=model, tokenizer=tokenizer)
    trainer.model.to(trainer.args.device)
    spent = time.perf_counter() - start
    examiner = Examiner(recipe, task, tokenizer=tokenizer)
    if this_rank() == 0:
        examiner.map_forks(trainer.model, folder / "trace")
    first = hash_logits(trainer.model, examiner.prompts[0])
    rolled = 0 if trainer.bases is None else min(recipe.forks.prompts, len(trainer.train_dataset)) * recipe.group
    watch = Watch(recipe, arm, examiner=examiner, trainer=trainer, init_seconds=spent, init_rollouts=rolled)
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(watch)
    if recipe.steps:
        trainer.train()
    else:  # max_steps=0 would mean no limit
        watch.on_train_begin(trainer.args, trainer.state, trainer.control)
    adapter = save_plain_lora(trainer.model, folder / "adapter")
    if hash_tensors(trainer.model) != base_hash:
        raise RuntimeError("the base weights changed while the adapter was trained: the record would be worthless.")
    peak = max(gathered(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)) * 1024
    return watch.figures() | {
        "trained_parameters": sum(_size(p) for p in trainer.model.parameters() if p.requires_grad),
        "adapter_bytes": (adapter / "adapter_model.safetensors").stat().st_size,
        "peak_memory_bytes": peak,
        "step0_hash": first,
        "base_hash": base_hash,
        "spectrum": None if trainer.bases is None else trainer.bases.spectrum.tolist(),
    }


def _size(parameter: nn.Parameter) -> int:
    """Numbers in a parameter, all of them where this rank holds a part (ZeRO-3)."""
    return getattr(parameter, "ds_numel", parameter.numel())


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

    args = trainer_settings(recipe, arm, folder=folder)
    if args.world_size != recipe.ranks:
        raise ValueError(f"the recipe asks for {recipe.ranks} ranks, and {args.world_size} train together.")
    return ForkGRPOTrainer(
        model, reward, args, train_dataset=rows, processing_class=tokenizer, peft_config=adapter_config(arm)
    )


def trainer_settings(recipe: Recipe, arm: Arm, *, folder: Path) -> ForkGRPOConfig:
    """The settings of an arm's trainer: a step has the same rollouts for any number of ranks."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # it warns of every optimizer that is not its own
    fixed = arm.optimizer == "length"
    return ForkGRPOConfig(
        str(folder),
        per_device_train_batch_size=recipe.prompts * recipe.group // recipe.ranks,
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
        disable_tqdm=this_rank() > 0,
        deepspeed=None if recipe.deepspeed is None else str(deepspeed_path(recipe.deepspeed)),
    )


class Watch(TrainerCallback):
    """Measures held-out accuracy on its way, keeps the curve and shows one bar."""

    def __init__(
        self,
        recipe: Recipe,
        arm: Arm,
        *,
        examiner: Examiner,
        trainer: ForkGRPOTrainer,
        init_seconds: float,
        init_rollouts: int,
    ) -> None:
        self.recipe, self.examiner, self.trainer = recipe, examiner, trainer
        self.init_seconds, self.init_rollouts = init_seconds, init_rollouts
        self.training_seconds, self.since = 0.0, 0.0
        self.curve: list[dict[str, Any]] = []
        self.bar = tqdm(total=recipe.steps, desc=arm.name, unit="step", disable=this_rank() > 0)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Accuracy before the first step."""
        self._point(0, None, due=True)
        self.since = time.perf_counter()

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """After every step: the reward of its rollouts, and accuracy where it is due."""
        if "reward" not in logs:
            return
        self.training_seconds += time.perf_counter() - self.since
        step, every = state.global_step, self.recipe.evaluation.every
        self._point(step, logs["reward"], due=step % every == 0 or step == self.recipe.steps)
        self.bar.update(1)
        self.since = time.perf_counter()

    def _point(self, step: int, reward: float | None, *, due: bool) -> None:
        accuracy = self._accuracy() if due else None
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

    def _accuracy(self) -> float:
        """Of the policy without wrappers; every rank takes part, and under ZeRO-3 each holds all weights meanwhile."""
        with unwrap_model_for_generation(self.trainer.model_wrapped, self.trainer.accelerator) as policy:
            return self.examiner.accuracy(policy)

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


def run_from_shell(recipe_file: str, arm_name: str) -> None:
    """:func:`main`, but of a setting that turned out impossible only the message is shown: it says all there is."""
    try:
        main(recipe_file, arm_name)
    except ValueError as error:
        sys.exit(f"forklora: arm {arm_name}: {error}")


if __name__ == "__main__":
    run_from_shell(*sys.argv[1:])
