"""One rank of a group of cells: trains them one after another with the real trainer, and writes what each showed.

Decisions: the model comes by name, as users load it (so ZeRO stage 3 partitions it while it is read); everything is
compared with what was on disk before; a fault ends the process, since what a broken engine leaves behind would reach
the next cell: the parent starts a new group for the rest. The process ends as soon as stdin is closed.

    python -m forklora.recipes.stages_side SPEC.json     (or under DeepSpeed's launcher)
"""

import hashlib
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from forklora.recipes.files import write_json
from forklora.recipes.launch import end_with_parent
from forklora.recipes.options import Closed
from forklora.recipes.ranks import gathered, this_rank
from forklora.recipes.stages_inputs import deepspeed_config, low_words, prompts, tokenizer
from forklora.recipes.stages_plan import ADAPTERS, COMPLETION, GROUP, STEPS, Cell
from forklora.trainers.releasing import release
from forklora.trainers.rl import ForkGRPOTrainer
from forklora.trainers.settings import ForkGRPOConfig
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from forklora.adapter import ForkLoraConfig
from forklora.bases import Bases
from forklora.export import plain_lora
from forklora.gathering import whole
from forklora.rollouts import evaluating
from forklora.trace import Trace

# Rates that move the weights about as far as the step length does. Nothing is clipped: a wrong scale must show.
_RATES = {"sgd": 1.0, "adamw": 0.004, "length": 0.2, "kl": 0.3}


class Spec(Closed):
    """What a group of processes is told."""

    output: str
    """Folder with the inputs; each cell writes into a folder of its own below it."""
    digest: str
    """Stands in every result: of which code and versions it is."""
    cells: tuple[Cell, ...]
    """What to run, in this order."""


def main(spec_file: str) -> None:
    """Run all cells of the group."""
    end_with_parent()
    spec = Spec.model_validate_json(Path(spec_file).read_text(encoding="utf-8"), strict=False)
    rank = this_rank()
    for cell in spec.cells:
        folder = cell.folder(Path(spec.output))
        folder.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        try:
            found = run_cell(cell, Path(spec.output))
        finally:
            error = sys.exc_info()[1]
            if error is not None:
                said = f"rank {rank}: {type(error).__name__}: {error}"
                (folder / f"error-{rank}.txt").write_text(said, encoding="utf-8")
        if rank == 0:
            known = {"cell": cell.model_dump(mode="json"), "digest": spec.digest, "failed": None}
            write_json(folder / "result.json", known | found | {"seconds": round(time.perf_counter() - start, 2)})


def run_cell(cell: Cell, output: Path) -> dict[str, Any]:
    """Train a cell and look at what came out, on every rank; returns its rewards and measures."""
    folder = cell.folder(output)
    trainer = build_trainer(cell, output)
    trainer.train()
    trainer.save_model(str(folder / "adapter"))
    with whole(*trainer.model.parameters()):
        _, live = plain_lora(trainer.model)
        base = {_bare(n): p.detach().clone() for n, p in trainer.model.named_parameters() if "lora_" not in n}
    ids = torch.tensor([tokenizer()(text)["input_ids"] for text in prompts()["prompt"][::4]])
    trained = _logits(trainer.model_wrapped, ids)
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    hashes = [_hash(live), *([_hash(dict(_named(trainer.bases)))] if trainer.bases is not None else [])]
    release(trainer)
    everywhere = gathered(hashes)
    stock = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(output / "model", dtype=cell.dtype), str(folder / "adapter")
    )
    saved = load_file(folder / "adapter" / "adapter_model.safetensors")
    mine = {
        "base": _changed(base, load_file(output / "model" / "model.safetensors"), dtype=getattr(torch, cell.dtype)),
        "export": _missing(saved, live, base) + _missing(get_peft_model_state_dict(stock), live, base),
        "reload": float((_logits(stock, ids) - trained).norm() / trained.norm()),
        "copies": sum(other != hashes for other in everywhere),
    }
    each = gathered(mine)
    return {"rewards": rewards, "measures": {name: max(one[name] for one in each) for name in mine}}


class OneRollouts(ForkGRPOTrainer):
    """The real trainer; in bfloat16 it samples as ever, but trains on what the cell it is held against has drawn.

    How many rows are multiplied together changes the rounding of bfloat16, and with it a draw now and then: from there
    on two runs learn from different completions. Whether draws are equal is shown by float32.
    """

    cell: Cell
    output: Path

    def draw(self, model: nn.Module, prompts: list[list[int]]) -> Trace:
        """What was drawn, or what stands in its place."""
        drawn, rank = super().draw(model, prompts), self.accelerator.process_index
        if self.cell.dtype == "float32":
            return drawn
        single, rows = self.cell.single, len(prompts)
        part = rank if single.ranks > 1 else 0
        file = single.folder(self.output) / "rollouts" / f"{self.state.global_step}-{part}.safetensors"
        if self.cell == single:
            drawn.save(file)
            return drawn
        first = 0 if single.ranks > 1 else rank * rows
        return Trace.load(file).select(range(first, first + rows))


def build_trainer(cell: Cell, output: Path) -> ForkGRPOTrainer:
    """The real trainer of a cell on the policy in ``output/model``."""
    args = ForkGRPOConfig(
        str(cell.folder(output)),
        deepspeed=deepspeed_config(cell.stage),
        model_init_kwargs={"dtype": cell.dtype},
        per_device_train_batch_size=cell.rows,
        gradient_accumulation_steps=cell.accumulation,
        num_generations=GROUP,
        max_completion_length=COMPLETION,
        max_steps=STEPS,
        basis_prompts=len(prompts()),
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=0.0,
        loss_type="dr_grpo",
        scale_rewards="none",
        shuffle_dataset=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        report_to=[],
        **_optimizer(cell),
    )
    given = None if cell.kind == "collected" else Bases.load(output / "bases.safetensors")
    config = ForkLoraConfig(**ADAPTERS[cell.kind], bases=given)
    rows, words = prompts(), tokenizer()
    trainer = OneRollouts(
        str(output / "model"), low_words, args, train_dataset=rows, processing_class=words, peft_config=config
    )
    trainer.cell, trainer.output = cell, output
    return trainer


def _optimizer(cell: Cell) -> dict[str, Any]:
    rate = _RATES[cell.optimizer]
    if cell.optimizer == "length":
        return {"step_length": rate}
    if cell.optimizer == "kl":
        return {"step_length": None, "step_kl": rate**2 / 2}
    return {"step_length": None, "optim": {"adamw": "adamw_torch"}.get(cell.optimizer, "sgd"), "learning_rate": rate}


def _bare(name: str) -> str:
    return name.replace("base_model.model.", "", 1).replace(".base_layer", "")


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    with evaluating(model):
        return model(input_ids=ids).logits.float()


def _named(bases: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for layer, basis in bases.items():
        yield f"{layer}.output", basis.output
        yield f"{layer}.input", basis.input


def _hash(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _changed(found: Mapping[str, Tensor], before: Mapping[str, Tensor], *, dtype: torch.dtype) -> int:
    """Number of base tensors that are not bit for bit what was loaded."""
    names = found.keys() | before.keys()
    return sum(
        name not in found or name not in before or not torch.equal(found[name], before[name].to(dtype))
        for name in names
    )


def _missing(saved: Mapping[str, Tensor], live: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> int:
    """Number of adapter tensors, two for every linear layer, that the file lacks or holds otherwise than the model."""
    linear = sum("_proj.weight" in name for name in base)
    wrong = sum(name not in saved or not torch.equal(saved[name], live[name]) for name in live)
    return wrong + len(saved.keys() - live.keys()) + abs(2 * linear - len(live))


if __name__ == "__main__":
    main(*sys.argv[1:])
