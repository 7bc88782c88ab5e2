"""Laws of the trainer under DeepSpeed, two ranks: the path of one process, whole adapters, exact resuming."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from forklora.trainers.checkpoints import break_seal
from forklora.trainers.rl import ForkGRPOConfig, ForkGRPOTrainer
from peft import PeftModel
from safetensors.torch import load_file
from torch import distributed

from forklora.adapter import ForkLoraConfig
from forklora.state import adapter_tensors
from ranks import configuration, together
from tiny_policy import eager, llama, logits, prompts, shorter, tokenizer, trainer_of

pytestmark = pytest.mark.slow
STAGES, STEPS = range(4), 4
OPTIONS = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 2, "seed": 3, "temperature": 1.0}
AUTO = {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "train_batch_size": "auto"}


def trainer(folder, stage, *, kind="block", ranks=2, **options):
    """A trainer whose global batch is the same for any number of ranks."""
    AcceleratorState._reset_state(reset_partial_state=False)
    engine = {} if stage is None else {"deepspeed": configuration(stage, **AUTO)}
    rows = {"per_device_train_batch_size": 8 // ranks, "bf16": None if engine else False}
    return trainer_of(folder, kind=kind, bases=True, **(OPTIONS | rows | engine | options))


def path_of(made):
    """What tells two runs apart: rewards by step, and the adapter at the end."""
    rewards = [line["reward"] for line in made.state.log_history if "reward" in line]
    return {"rewards": rewards, "end": {n: t.tolist() for n, t in adapter_tensors(made.model).items()}}


def one_stage(folder, stage):
    """A whole run, and one that resumes from a checkpoint while the next one was cut short."""
    folder = Path(folder, str(stage))
    whole = trainer(folder, stage)
    whole.train()
    whole.save_model(str(folder / "saved"))
    found = {"whole": path_of(whole), "dtypes": sorted({str(p.dtype) for p in adapter_tensors(whole.model).values()})}
    if distributed.get_rank() == 0:
        break_seal(folder / "checkpoint-4")
        shutil.rmtree(folder / "checkpoint-4" / "global_step4")
    distributed.barrier()
    again = trainer(folder, stage)
    again.train(resume_from_checkpoint=True)
    return found | {"again": path_of(again), "steps": again.state.global_step}


def every_stage(folder):
    return {str(stage): one_stage(folder, stage) for stage in STAGES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stages")


@pytest.fixture(scope="module")
def ranks(folder):
    return together(every_stage, folder=str(folder), timeout=280)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    made = trainer(tmp_path_factory.mktemp("alone"), None, ranks=1)
    made.train()
    return path_of(made)


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_take_the_path_of_one_process(ranks, alone, stage):
    for found in ranks:
        assert found[str(stage)]["whole"]["rewards"] == pytest.approx(alone["rewards"])
        same(found[str(stage)]["whole"]["end"], alone["end"], tolerance=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_ends_where_the_whole_one_does(ranks, stage):
    for found in (rank[str(stage)] for rank in ranks):
        assert found["steps"] == STEPS
        same(found["again"]["end"], found["whole"]["end"], tolerance=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_the_saved_adapter_is_whole_and_stock_peft_computes_the_same(ranks, folder, stage):
    saved = folder / str(stage) / "saved"
    tensors = load_file(saved / "adapter_model.safetensors")
    assert len(tensors) == 2 * 14 and all(t.numel() and t.dtype == torch.float32 for t in tensors.values())
    assert json.loads((saved / "adapter_config.json").read_text())["peft_type"] == "LORA"
    end = {n: torch.tensor(t) for n, t in ranks[0][str(stage)]["whole"]["end"].items()}
    stock = PeftModel.from_pretrained(eager(llama(tied=False)), saved)
    first = "base_model.model.model.layers.0.mlp.up_proj.lora_"
    product = end[f"{first}B.default.basis"] @ end[f"{first}B.default.core"]
    torch.testing.assert_close(stock.get_parameter(f"{first}B.default.weight"), torch.nn.Parameter(product))
    assert torch.equal(stock.get_parameter(f"{first}A.default.weight"), end[f"{first}A.default.weight"])
    assert not torch.equal(logits(stock), logits(eager(llama(tied=False))))


@pytest.mark.parametrize("stage", STAGES)
def test_the_adapter_stays_in_float32(ranks, stage):
    assert all(found[str(stage)]["dtypes"] == ["torch.float32"] for found in ranks)


def same(found, expected, *, tolerance):
    assert found.keys() == expected.keys()
    size = max(torch.tensor(t).abs().max() for t in expected.values())
    for name, numbers in expected.items():
        assert (torch.tensor(found[name]) - torch.tensor(numbers)).abs().max() <= tolerance * size, name


def by_name(folder):
    """Precisions of a policy given by name: of its weights in pieces, and of the adapter, before and in training."""
    AcceleratorState._reset_state(reset_partial_state=False)
    settings = {"deepspeed": configuration(3, **AUTO), "model_init_kwargs": {"dtype": "bfloat16"}}
    args = {"use_cpu": True, "num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 4}
    given = {"train_dataset": prompts(), "processing_class": tokenizer(), "peft_config": ForkLoraConfig(r=1)}
    config = ForkGRPOConfig(f"{folder}/out", max_steps=1, basis_prompts=4, report_to=[], **args, **settings)
    made = ForkGRPOTrainer(f"{folder}/model", shorter, config, **given)
    pieces = [p for p in made.model.parameters() if hasattr(p, "ds_id")]
    made.train()
    trained = {str(p.dtype) for p in made.model.parameters() if p.requires_grad}
    enabled = (config.deepspeed_plugin.deepspeed_config.get("bf16") or {}).get("enabled", False)
    return {"pieces": sorted({str(p.dtype) for p in pieces}), "trained": sorted(trained), "engine": enabled}


def test_a_policy_by_name_keeps_its_precision_in_pieces_and_the_adapter_float32(tmp_path):
    llama(tied=False, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    for found in together(by_name, folder=str(tmp_path)):
        assert found == {"pieces": ["torch.bfloat16"], "trained": ["torch.float32"], "engine": False}
