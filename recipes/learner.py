"""Builds what learns in an arm: a trainer with the recipe's task, model and settings, and the arm's adapter on it.

Decisions: rewards are centered per group and not scaled, the loss is Dr. GRPO's; a step has the same rollouts for any
number of ranks; seconds of initialization hold everything an adapter asks for before its first step, also what an
earlier run did for it.
"""

import logging
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from forklora.recipes.config import Recipe
from forklora.recipes.data_starts import Reward, Started, started
from forklora.recipes.demo import load_model
from forklora.recipes.offline import OfflineTrainer
from forklora.recipes.options import FORK_KINDS, Arm, ForkSpec
from forklora.recipes.peft_arms import adapter_config, keeps_base, lay_out, unfreeze, weights_dtype
from forklora.recipes.provenance import hash_tensors
from forklora.recipes.ranks import this_rank
from forklora.recipes.sources import arm_bases
from forklora.recipes.tasks import Task
from forklora.recipes.zero import deepspeed_path
from forklora.trainers.rl import ForkGRPOConfig, ForkGRPOTrainer
from transformers import set_seed

from forklora.export import save_plain_lora


@dataclass(frozen=True)
class Learner:
    """An arm ready for its first step.

    Attributes:
        trainer: with the adapter on its model.
        task: asks the questions.
        tokenizer: of the model.
        arm: what it is made from.
        init_seconds: for the adapter and all it needs.
        init_rollouts: for its bases, or for the gradient that it starts from.
        base_hash: of the weights before anything was done to them.
        spectrum: eigenvalues of the forks' covariance; None without forks.
    """

    trainer: ForkGRPOTrainer
    task: Task
    tokenizer: Any
    arm: Arm
    init_seconds: float
    init_rollouts: int
    base_hash: str
    spectrum: list[float] | None

    @property
    def keeps_base(self) -> bool:
        """Whether the model's own weights stay as they were."""
        return keeps_base(self.arm)

    def rollouts(self, step: int) -> int:
        """Rollouts drawn until after a step, those for the bases among them."""
        args = self.trainer.args
        drawn = step * args.per_device_train_batch_size * args.world_size
        if self.arm.base_prompts is not None:
            drawn = self.arm.base_prompts * args.num_generations
        return self.init_rollouts + drawn

    def save(self, folder: Path) -> int | None:
        """Write the adapter; returns the bytes of its weights. None for weights that are the model's own.

        An adapter that has changed the base is of no use beside an unchanged one: only its size is taken.
        """
        model: Any = self.trainer.model
        if self.arm.adapter == "full":
            return None
        if self.arm.adapter == "tinylora":
            model.save_pretrained(folder)
            return (folder / "adapter_model.safetensors").stat().st_size
        with tempfile.TemporaryDirectory() as spare:
            saved = save_plain_lora(model, folder if self.keeps_base else Path(spare) / "adapter")
            return (saved / "adapter_model.safetensors").stat().st_size


def learner_of(recipe: Recipe, *, folder: Path) -> Learner:
    """The learner of a recipe's one arm; what its adapter starts from is found. Every rank has to call this."""
    arm, task = recipe.arms[0], recipe.task.build()
    set_seed(recipe.seed)
    model, tokenizer = load_model(recipe.model.name, weights_dtype(recipe, arm))
    base_hash = hash_tensors(model)
    args = trainer_settings(recipe, arm, folder=folder)  # from here on ranks know of each other
    if args.world_size != recipe.ranks:
        raise ValueError(f"the recipe asks for {recipe.ranks} ranks, and {args.world_size} train together.")
    model: Any = model.to(args.device)
    start = time.perf_counter()
    sourced = None if _collects(recipe, arm) else arm_bases(recipe, arm, model=model, tokenizer=tokenizer)
    spared = 0.0 if sourced is None else sourced.seconds - (time.perf_counter() - start)
    if arm.adapter == "full":
        unfreeze(model, arm)
    config = adapter_config(arm, sourced=sourced, seed=recipe.seed)
    reward = coins(recipe.seed) if arm.reward == "random" else _scored(task)
    ready = started(recipe, arm, model=model, tokenizer=tokenizer, config=config, reward=reward)
    trainer = _trainer(recipe, args, task=task, tokenizer=tokenizer, ready=ready)
    lay_out(trainer.model)
    seconds = time.perf_counter() - start + spared
    rolled, spectrum = ready.rollouts, None
    if sourced is not None:
        rolled, spectrum = sourced.rollouts, sourced.bases.spectrum
    elif trainer.bases is not None:
        rolled = min(recipe.forks.prompts, len(trainer.train_dataset)) * recipe.group
        spectrum = trainer.bases.spectrum
    values = None if spectrum is None else spectrum.tolist()
    return Learner(trainer, task, tokenizer, arm, seconds, rolled, base_hash, values)


def _collects(recipe: Recipe, arm: Arm) -> bool:
    """Whether the trainer itself collects the bases, from the first of its own prompts."""
    plain = ForkSpec(prompts=recipe.forks.prompts, seed=recipe.forks.seed)
    alone = recipe.forks == plain and arm.forks is None and arm.layers is None
    return arm.adapter in FORK_KINDS and arm.basis == "forks" and alone


def _trainer(
    recipe: Recipe,
    args: ForkGRPOConfig,
    *,
    task: Task,
    tokenizer: Any,  # noqa: ANN401
    ready: Started,
) -> ForkGRPOTrainer:
    arm = recipe.arms[0]
    distinct = arm.base_prompts or max(recipe.steps, 1) * recipe.prompts
    questions = task.examples(distinct, seed=recipe.seed, split="train")
    rows = Dataset.from_list([{"prompt": e.prompt, "answer": e.answer} for e in questions])
    reward = coins(recipe.seed) if arm.reward == "random" else _scored(task)
    kind = ForkGRPOTrainer if arm.base_prompts is None else OfflineTrainer
    return kind(ready.model, reward, args, train_dataset=rows, processing_class=tokenizer, peft_config=ready.config)


def _scored(task: Task) -> Reward:
    def reward(completions: list[str], answer: list[str], **_: object) -> list[float]:
        return [task.score(c, a) for c, a in zip(completions, answer, strict=True)]

    return reward


def coins(seed: int) -> Reward:
    """A reward that knows nothing of the completions: 0 or 1 with equal chance, by seed, rank and place alone."""
    draw = random.Random(f"coins/{seed}/{this_rank()}")

    def reward(completions: list[str], **_: object) -> list[float]:
        return [float(draw.random() < 0.5) for _ in completions]

    return reward


def trainer_settings(recipe: Recipe, arm: Arm, *, folder: Path) -> ForkGRPOConfig:
    """The settings of an arm's trainer: a step has the same rollouts for any number of ranks."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # it warns of every optimizer that is not its own
    change = arm.rate if arm.optimizer == "kl" else arm.brake
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
        step_length=arm.rate if arm.optimizer == "length" else None,
        step_kl=None if change is None else change**2 / 2,
        step_evenly=arm.evenly,
        learning_rate=arm.rate,
        optim="sgd" if arm.optimizer == "sgd" else "adamw_torch",
        lr_scheduler_type=arm.schedule,
        top_entropy_quantile=arm.top_entropy,
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
