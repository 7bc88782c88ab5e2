"""The set of trained tensors, and the base, survive a resume of somebody else's trainer."""

import pytest
from transformers import Trainer, TrainingArguments

from tiny_policy import FORMS, adapted, deltas, fingerprints, llama, tokens, trainable


def trainer_on(model, folder, *, steps):
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in tokens(rows=8)]
    settings = {
        "per_device_train_batch_size": 2, "max_steps": steps, "save_steps": 2, "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "learning_rate": 0.01, "lr_scheduler_type": "constant", "logging_strategy": "no",
        "seed": 4,
    }  # fmt: skip
    return Trainer(model, TrainingArguments(str(folder), **settings), train_dataset=rows)


@pytest.mark.parametrize("kind, trained", FORMS)
def test_a_resumed_trainer_trains_the_same_tensors_and_leaves_the_base(kind, trained, tmp_path):
    base = fingerprints(llama())
    model, bases = adapted(kind, train_basis=trained)
    expected = trainable(model)
    trainer_on(model, tmp_path, steps=3).train()
    resumed, _ = adapted(kind, bases=bases, train_basis=trained)
    trainer = trainer_on(resumed, tmp_path, steps=3)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert trainer.state.global_step == 3
    assert trainable(resumed) == expected
    assert fingerprints(resumed) == base
    found, whole = deltas(resumed), deltas(model)
    # how a product with a trained basis was split is not in an ordinary LoRA, and Adam's steps depend on it
    tolerance = 0.2 if trained and kind in ("core", "block") else 1e-3
    for name, delta in whole.items():
        assert (found[name] - delta).norm() < tolerance * delta.norm()
