"""Trains one arm of a recipe in processes of its own, one per rank, and writes its record.

Decisions: all arms see the same prompts in the same order, the same sampler and the same held-out prompts; the record
appears when the arm has ended, complete, also when it failed. Rank 0 writes it after the last collective; of ranks that
fail the first one does, because the others then fail only for want of it. Several arms may follow each other in one
process, each with a model and an engine of its own.

    python -m forklora.recipes.arm RECIPE.json ARM
"""

import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forklora.recipes.config import Recipe
from forklora.recipes.demo import load_model
from forklora.recipes.evaluate import Examiner
from forklora.recipes.files import write_json
from forklora.recipes.learner import Learner, learner_of
from forklora.recipes.memory import Peak
from forklora.recipes.outcome import outcome
from forklora.recipes.provenance import hash_logits, hash_tensors, provenance
from forklora.recipes.ranks import gathered, this_rank
from forklora.recipes.watch import Watch
from forklora.recipes.zero import deepspeed_settings
from forklora.trainers.releasing import release
from torch import nn
from transformers import PrinterCallback, ProgressCallback
from trl.models import unwrap_model_for_generation

_started: list[str] = []  # arms that this process has trained, or tried to


def main(recipe_file: str, arm_name: str) -> None:
    """Train the named arm of the recipe in the file; a failure is recorded and raised again."""
    recipe = Recipe.model_validate_json(Path(recipe_file).read_text())
    arm = next(a for a in recipe.arms if a.name == arm_name)
    record: dict[str, Any] = {"arm": arm.name, "task": recipe.task.name, "seed": recipe.seed, "error": None}
    record |= {"ranks": recipe.ranks, "deepspeed": deepspeed_settings(recipe.deepspeed)}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    record |= {"created_at": now, "recipe": recipe.model_dump(mode="json"), **provenance()}
    folder = Path(recipe.output) / arm.name
    file, rank, start = folder / "record.json", this_rank(), time.perf_counter()
    try:
        record |= {"status": "done", **train_arm(recipe.model_copy(update={"arms": (arm,)}), folder=folder)}
    finally:
        error = sys.exc_info()[1]
        mine = rank == 0
        if error is not None:
            stopped = isinstance(error, KeyboardInterrupt)
            text = f"{'' if recipe.ranks == 1 else f'rank {rank}: '}{type(error).__name__}: {error}"
            record |= {"status": "interrupted" if stopped else "failed", "error": text}
            mine = recipe.ranks == 1 or not file.exists()
        if mine:
            write_json(file, record | {"total_seconds": round(time.perf_counter() - start, 3)})


def train_arm(recipe: Recipe, *, folder: Path) -> dict[str, Any]:
    """Everything that is done with a recipe's one arm; returns the measured part of its record."""
    peak = Peak(first=not _started)
    _started.append(recipe.arms[0].name)
    learner = learner_of(recipe, folder=folder)
    trainer = learner.trainer
    try:
        examiner = Examiner(recipe, learner.task, tokenizer=learner.tokenizer)
        if this_rank() == 0 and recipe.part is None:
            examiner.map_forks(trainer.model, folder / "trace")
        first = hash_logits(trainer.model, examiner.prompts[0])
        watch = _train(recipe, learner, examiner)
        if learner.keeps_base and hash_tensors(trainer.model) != learner.base_hash:
            raise RuntimeError("the base weights changed while the adapter was trained: the record would be worthless.")
        most = gathered(peak.bytes())
        return watch.figures() | {
            "trained_parameters": sum(_size(p) for p in trainer.model.parameters() if p.requires_grad),
            "adapter_bytes": learner.save(folder / "adapter"),
            "peak_memory_bytes": None if None in most else max(most),
            "step0_hash": first,
            "base_hash": learner.base_hash,
            "spectrum": learner.spectrum,
            "outcome": None if recipe.outcome is None else _outcome(recipe, learner, examiner),
        }
    finally:
        release(trainer)


def _train(recipe: Recipe, learner: Learner, examiner: Examiner) -> Watch:
    trainer, seconds = learner.trainer, learner.init_seconds
    watch = Watch(recipe, examiner=examiner, trainer=trainer, init_seconds=seconds, rollouts=learner.rollouts)
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(watch)
    if recipe.steps:
        trainer.train()
    else:  # max_steps=0 would mean no limit
        watch.on_train_begin(trainer.args, trainer.state, trainer.control)
    return watch


def _outcome(recipe: Recipe, learner: Learner, examiner: Examiner) -> dict[str, Any]:
    """What became of the policy; under ZeRO-3 every rank holds all weights meanwhile."""
    base, _ = load_model(recipe.model.name, recipe.model.dtype)
    base.to(learner.trainer.args.device)
    with unwrap_model_for_generation(learner.trainer.model_wrapped, learner.trainer.accelerator) as policy:
        return outcome(recipe, policy, base=base, tokenizer=learner.tokenizer, examiner=examiner)


def _size(parameter: nn.Parameter) -> int:
    """Numbers in a parameter, all of them where this rank holds a part (ZeRO-3)."""
    return getattr(parameter, "ds_numel", parameter.numel())


def run_from_shell(recipe_file: str, arm_name: str) -> None:
    """:func:`main`, but of a setting that turned out impossible only the message is shown: it says all there is."""
    try:
        main(recipe_file, arm_name)
    except ValueError as error:
        sys.exit(f"forklora: arm {arm_name}: {error}")


if __name__ == "__main__":
    run_from_shell(*sys.argv[1:])
