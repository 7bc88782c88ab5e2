"""Bases renewed while a policy is trained: nothing else of the training moves, and a cut run goes on to the bit."""

from functools import partial

import pytest
import torch
from forklora.trainers.engine import put_parameter
from forklora.trainers.refresh import RefreshCallback
from peft import LoraConfig, PeftModel
from torch import distributed
from transformers import TrainerControl, TrainerState, TrainingArguments

from forklora.bases import BasisConfig
from forklora.rollouts import Sampler
from forklora.slots import folded, renew_bases
from ranks import engine, together
from tiny_policy import (
    adapted,
    eager,
    fingerprints,
    letters,
    llama,
    logits,
    loss_of,
    prompts,
    random_bases,
    tokenizer,
    tokens,
    trainer_of,
)

ADAMW = {"step_length": None, "optim": "adamw_torch", "learning_rate": 0.01}
ROUNDING = {"rtol": 1e-4, "atol": 2e-5}


def callback(*, every=2, count=8):
    texts = [p["prompt"] for p in prompts(count=count)]
    collect = BasisConfig(group=4, progress=False)
    return RefreshCallback(tokenizer(), texts, sampler=Sampler(max_new_tokens=8), every=every, collect=collect)


def made(folder, *, steps=5, **options):
    """A trainer with the callback."""
    trainer = trainer_of(folder, reward=letters, kind="block", bases="own", max_steps=steps, **options)
    refresh = callback()
    trainer.add_callback(refresh)
    return trainer, refresh


def adapter(model):
    return {n: t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()] if "lora_" in n}


def test_bases_are_renewed_when_due_and_training_goes_on_in_them(tmp_path):
    trainer, refresh = made(tmp_path, step_length=0.1)
    base = fingerprints(trainer.model)
    trainer.train()
    assert refresh.renewed == [2, 4] and folded(trainer.model) == 2
    assert fingerprints(trainer.model) == base
    logged = [entry for entry in trainer.state.log_history if "refresh/renewed" in entry]
    assert [(entry["step"], entry["refresh/renewed"]) for entry in logged] == [(2, 1), (4, 2)]
    trainer.save_model(tmp_path / "saved")
    plain = PeftModel.from_pretrained(eager(llama(tied=False)), tmp_path / "saved")
    assert plain.peft_config["default"].r == 6
    torch.testing.assert_close(logits(plain), logits(trainer.model), **ROUNDING)


def test_the_policy_is_the_same_right_before_and_right_after(tmp_path):
    trainer, refresh = made(tmp_path, steps=3, step_length=0.1)
    trainer.train()
    two, _ = made(tmp_path / "two", steps=2, step_length=0.1)
    two.train()  # not after the last step
    assert refresh.renewed == [2] and folded(two.model) == 0
    before = logits(two.model)
    renew_bases(two.model, random_bases(eager(llama(tied=False)), seed=7))
    torch.testing.assert_close(logits(two.model), before, **ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"step_length": 0.1}, ADAMW])
def test_a_run_that_was_cut_goes_on_to_the_bit(options, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1}
    whole, _ = made(tmp_path / "whole", **options)
    whole.train()
    for at in (2, 3):
        cut, _ = made(tmp_path / f"cut-{at}", steps=5, **options, **saving)
        cut.train()
        again, refresh = made(tmp_path / f"cut-{at}", steps=5, **options, **saving)
        again.train(resume_from_checkpoint=str(tmp_path / f"cut-{at}" / f"checkpoint-{at}"))
        assert refresh.renewed == [4] and folded(again.model) == 2
        wanted, found = adapter(whole.model), adapter(again.model)
        assert wanted.keys() == found.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_states_of_the_old_bases_are_dropped(tmp_path):
    trainer, _ = made(tmp_path, steps=3, **ADAMW)
    trainer.train()
    counts = {float(state["step"]) for state in trainer.optimizer.state.values()}
    assert counts == {1}


def test_what_cannot_be_renewed_is_refused_before_the_first_step(tmp_path):
    trainer, _ = made(
        tmp_path,
        save_strategy="steps",
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        eval_dataset=prompts(),
    )
    with pytest.raises(ValueError, match="load_best_model_at_end=True: a checkpoint of before"):
        trainer.train()
    plain = trainer_of(tmp_path, peft_config=LoraConfig(r=1, target_modules="all-linear"))
    plain.add_callback(callback())
    with pytest.raises(ValueError, match="'default' is no fork adapter"):
        plain.train()
    with pytest.raises(ValueError, match="every=0"):
        callback(every=0)
    with pytest.raises(ValueError, match="there must be prompts"):
        callback(count=0)


def trained_across_a_renewal(step, model, *, rows):
    """Trained numbers after four steps, with new bases after the second."""
    for seed in range(4):
        if seed == 2:
            renew_bases(model, random_bases(llama(), seed=77), put=put_parameter)
        step(tokens(rows=2, seed=seed)[rows])
    return {n: p.detach().tolist() for n, p in model.named_parameters() if p.requires_grad}


def under(stage):
    model, rank = adapted("block")[0], distributed.get_rank()
    made = engine(model, stage)

    def step(ids):
        made.backward(loss_of(made, ids))
        made.step()

    return trained_across_a_renewal(step, model, rows=slice(rank, rank + 1))


def alone():
    model, _ = adapted("block")
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def step(ids):
        sgd.zero_grad()
        loss_of(model, ids).backward()
        sgd.step()

    return trained_across_a_renewal(step, model, rows=slice(None))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_on_two_ranks_of_zero_it_trains_on_as_one_process_alone_does(stage):
    expected = alone()
    for found in together(under, stage=stage):
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(values), rtol=1e-4, atol=1e-6)


def pieces():
    model = adapted("block")[0]
    engine(model, 3)
    with pytest.raises(ValueError, match="ZeRO-3 holds the adapter in pieces"):
        renew_bases(model, random_bases(llama(), seed=77), put=put_parameter)
    core = next(p for p in model.parameters() if p.requires_grad)
    with pytest.raises(ValueError, match="ZeRO-3 holds the parameter in pieces"):
        put_parameter(core, torch.zeros(1))
    return folded(model)


@pytest.mark.slow
def test_pieces_of_zero_3_are_refused():
    assert together(pieces) == [0, 0]


def momentum():
    model = adapted("block")[0]
    made = engine(model, 2, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    state, args = TrainerState(), TrainingArguments("unused", use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match="SGD in DeepSpeed keeps states of the old bases"):
        callback().on_train_begin(args, state, TrainerControl(), model=model, optimizer=made.optimizer)
    return True


@pytest.mark.slow
def test_states_that_deepspeed_holds_in_pieces_are_refused():
    assert together(momentum, ranks=1) == [True]
