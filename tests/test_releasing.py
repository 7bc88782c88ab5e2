"""A trainer that was let go leaves nothing behind: the next one of the process finds models whole, and no engine."""

import gc
import weakref

import pytest
import torch
from forklora.trainers.releasing import release
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from ranks import configuration, together
from tiny_policy import llama, logits, trainer_of


def test_a_trainer_without_an_engine_is_let_go_too(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.train()
    release(trainer)
    assert trainer.accelerator._models == [] and trainer.accelerator._optimizers == []
    gone = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert gone() is None


def one_after_the_other(folder):
    """Three trainers in one process, under ZeRO-3, under ZeRO-0 and alone; what each leaves behind."""
    said = []
    for place, stage in enumerate((3, 0, 3)):
        settings = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
        options = {"deepspeed": configuration(stage, **settings), "step_length": 0.1}
        trainer = trainer_of(f"{folder}/{place}", bases=True, **options)
        during = is_deepspeed_zero3_enabled()
        trainer.train()
        parted = any(p.numel() == 0 for p in trainer.model.parameters())
        release(trainer)
        model = llama()
        said.append([during, parted, is_deepspeed_zero3_enabled(), min(p.numel() for p in model.parameters())])
        said[-1].append(bool(logits(model).isfinite().all()))
    return said


@pytest.mark.slow
def test_engines_follow_each_other_in_one_process(tmp_path):
    pytest.importorskip("deepspeed")
    (said,) = together(one_after_the_other, ranks=1, folder=str(tmp_path))
    assert [row[0] for row in said] == [True, False, True]
    assert [row[1] for row in said] == [True, False, True]
    assert all(not row[2] and row[3] == 32 and row[4] for row in said)
    assert not torch.distributed.is_initialized()
