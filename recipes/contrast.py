"""Trains full weights by reinforcement learning, on-policy distillation and fine-tuning, and measures what each did.

Decisions: all ways train the same weights (every linear layer's, in float32) with the same prompts in each step, one
optimizer step a batch; the teacher of the distillation is the best reinforcement-learning run with AdamW, and its
signal is the reverse divergence on the student's own samples; fine-tuning sees the right answers. TRL's own trainers
do the last two. A finished run is not repeated; weights are kept of what a student still has to learn from.
"""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from forklora.recipes.config import Recipe
from forklora.recipes.contrast_plan import ContrastPlan, Run
from forklora.recipes.demo import load_model
from forklora.recipes.evaluate import Examiner
from forklora.recipes.files import write_json
from forklora.recipes.learner import learner_of
from forklora.recipes.measuring import measure_update
from forklora.recipes.pairs import WeightPairs
from forklora.recipes.peft_arms import unfreeze
from forklora.recipes.provenance import provenance
from forklora.recipes.refusal import Refusal
from forklora.recipes.spans import Spans, read_spans
from forklora.recipes.tasks import Example, Task
from forklora.trainers.releasing import release
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, set_seed
from trl import DistillationConfig, DistillationTrainer, SFTConfig, SFTTrainer

from forklora.bases import encode


def run_contrast(plan: ContrastPlan, *, overwrite: bool = False) -> dict[str, Any]:
    """Run what is missing of a contrast; returns the plan and every run's record.

    A record has ``status``, the accuracies ``start``, ``validation`` and ``test``, ``seconds`` of training, and
    ``update``, what :func:`forklora.recipes.measuring.measure_update` says of the weights; null where it failed.

    Args:
        plan: what to run.
        overwrite: run again what is done.
    """
    folder, records, spans = Path(plan.output), [], None
    for run in tqdm(plan.runs, desc="contrast", unit="run"):
        file = folder / run.name / "record.json"
        record = None if overwrite else _done(file, plan=plan, run=run)
        if record is None:
            spans = spans or _spans(plan)
            teacher = _teacher(records, folder) if run.way == "distill" else None
            record = {"run": run.name, "arm": run.arm, "rate": run.rate, "plan": plan.model_dump(mode="json")}
            record |= {**provenance(), **_run(plan, run, teacher=teacher, spans=spans)}
            write_json(file, record)
        records.append(record)
    return {"plan": plan.model_dump(mode="json"), "runs": records}


def _spans(plan: ContrastPlan) -> Spans:
    found = read_spans(plan.measurement(plan.model.name))
    assert found is not None, "the plan names a task"
    return found


def _done(file: Path, *, plan: ContrastPlan, run: Run) -> dict[str, Any] | None:
    """The finished record of the same run, whose weights are there if they may be asked for; or None."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        then = ContrastPlan.model_validate(record["plan"], strict=False)
    except (OSError, ValueError, KeyError):
        return None
    ignored = {"rates", "ways", "optimizers", "output"}
    same = plan.model_dump(exclude=ignored) == then.model_dump(exclude=ignored)
    kept = run.arm != "rl-adamw" or "distill" not in plan.ways or (file.parent / "model").is_dir()
    return record if same and kept and record["run"] == run.name and record["status"] == "done" else None


def _teacher(records: list[dict[str, Any]], folder: Path) -> Path:
    able = [record for record in records if record["arm"] == "rl-adamw" and record["status"] == "done"]
    if not able:
        raise Refusal("no rl-adamw run has ended well, so there is no teacher to distill from; try lower rates")
    return folder / max(able, key=lambda record: record["validation"])["run"] / "model"


def _run(plan: ContrastPlan, run: Run, *, teacher: Path | None, spans: Spans) -> dict[str, Any]:
    recipe = plan.recipe(run)
    folder = Path(plan.output) / run.name
    figures = _train(recipe, run, teacher=teacher, folder=folder)
    if figures["status"] != "done":
        return figures
    pairs = WeightPairs(plan.model.name, str(folder / "model"))
    pairs.names = [name for name in pairs.names if name.removesuffix(".weight") in spans.bases]
    update = measure_update(pairs, top=plan.top, exact=plan.exact, seed=plan.seed, spans=spans)
    if run.arm != "rl-adamw":
        shutil.rmtree(folder / "model")
    return figures | {"update": update}


def _train(recipe: Recipe, run: Run, *, teacher: Path | None, folder: Path) -> dict[str, Any]:
    """Train, ask and save; a policy that diverges is a finding."""
    trainer, task, tokenizer = _trainer(recipe, run, teacher=teacher)
    try:
        for callback in (ProgressCallback, PrinterCallback):
            trainer.remove_callback(callback)
        examiners = [Examiner(_asking(recipe, split), task, tokenizer=tokenizer) for split in ("validation", "test")]
        figures: dict[str, Any] = {"start": examiners[1].accuracy(trainer.model)}
        start = time.perf_counter()
        trainer.train()
        figures["seconds"] = time.perf_counter() - start
        figures |= {key: e.accuracy(trainer.model) for key, e in zip(("validation", "test"), examiners, strict=True)}
        trainer.model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
    except ValueError as error:
        return {"status": "failed", "error": str(error)}
    finally:
        release(trainer)
    return {"status": "done", "error": None, **figures}


def _asking(recipe: Recipe, split: str) -> Recipe:
    return recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"split": split})})


def _trainer(recipe: Recipe, run: Run, *, teacher: Path | None) -> tuple[Any, Task, Any]:
    """A trainer of the run, its task and tokenizer."""
    folder = Path(recipe.output) / run.name
    if run.way == "rl":
        learner = learner_of(recipe, folder=folder)
        return learner.trainer, learner.task, learner.tokenizer
    set_seed(recipe.seed)
    task = recipe.task.build()
    model: Any
    model, tokenizer = load_model(recipe.model.name, recipe.model.dtype)
    unfreeze(model, recipe.arms[0])
    questions = task.examples(recipe.steps * recipe.prompts, seed=recipe.seed, split="train")
    if run.way == "sft":
        rows = Dataset.from_list([_answered(q, task, tokenizer) for q in questions])
        args = SFTConfig(str(folder), max_length=None, **_settings(recipe, run))
        return SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer), task, tokenizer
    # what ends a completion of the task ends one here
    stops = [tokenizer(text)["input_ids"][-1] for text in recipe.sampling.stop or []]
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *stops]
    args = DistillationConfig(
        str(folder),
        max_completion_length=recipe.sampling.max_new_tokens,
        temperature=recipe.sampling.temperature,
        top_p=recipe.sampling.top_p,
        top_k=recipe.sampling.top_k,
        min_p=recipe.sampling.min_p,
        shuffle_dataset=False,
        **_settings(recipe, run),
    )
    rows = Dataset.from_list([{"prompt": q.prompt} for q in questions])
    guide, _ = load_model(str(teacher), recipe.model.dtype)
    return DistillationTrainer(model, guide, args, rows, processing_class=tokenizer), task, tokenizer


def _settings(recipe: Recipe, run: Run) -> dict[str, Any]:
    return {
        "per_device_train_batch_size": recipe.prompts,
        "max_steps": recipe.steps,
        "learning_rate": run.rate,
        "optim": "sgd" if run.optimizer == "sgd" else "adamw_torch",
        "lr_scheduler_type": recipe.arms[0].schedule,
        "weight_decay": 0.0,
        "seed": recipe.seed,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": not torch.cuda.is_available(),
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": [],
    }


def _answered(question: Example, task: Task, tokenizer: Any) -> dict[str, list[int]]:  # noqa: ANN401
    """A question's tokens with those of its right answer; the loss is taken on the latter."""
    answer = f" {question.answer}{task.stop[0] if task.stop else ''}"
    if task.score(answer, question.answer) != 1:
        raise Refusal(f"the task {task.name} does not pay for its own answer {answer!r}: nothing to fine-tune on")
    asked = encode(tokenizer, question.prompt)
    told = tokenizer(answer, add_special_tokens=False)["input_ids"]
    return {"input_ids": asked + told, "completion_mask": [0] * len(asked) + [1] * len(told)}
