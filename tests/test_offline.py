"""Training on rollouts of the base model: they are its own, drawn once, the same in every epoch."""

import pytest
import torch
from forklora.recipes.learner import learner_of
from forklora.recipes.offline import OfflineTrainer
from forklora.recipes.options import Arm
from transformers import TrainerCallback

from forklora import rollouts
from forklora.rollouts import sample
from forklora.unembed import read_unembedding
from test_arm_ranks import guessing
from tiny_policy import llama, recipe_of, shake, tokenizer


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    task = {"name": "multiplication", "options": {"low": 0, "high": 2, "shots": 1}}
    return recipe_of(
        tmp_path_factory.mktemp("offline"), policy=guessing(llama(tied=False)), task=task, group=8, steps=6
    )


def learner(recipe, folder, **changes):
    settings = {"adapter": "lora", "rank": 2, "optimizer": "adamw", "base_prompts": 4, "rate": 0.05} | changes
    arm = Arm(name="offline", **settings)
    return learner_of(recipe.model_copy(update={"arms": (arm,)}), folder=folder)


class Kept(TrainerCallback):
    """The trace of every step."""

    def __init__(self, trainer):
        self.trainer, self.traces = trainer, []
        trainer.add_callback(self)

    def on_step_end(self, *_, **__):
        self.traces.append(self.trainer.trace)


@pytest.mark.parametrize("centering", ["sampler", "none"])
def test_every_epoch_has_the_same_rollouts_and_the_first_alone_draws(recipe, tmp_path, centering, monkeypatch):
    made = learner(recipe, tmp_path, centering=centering)
    assert isinstance(made.trainer, OfflineTrainer)
    kept, calls = Kept(made.trainer), []
    decode = rollouts._decode
    monkeypatch.setattr(rollouts, "_decode", lambda *args, **more: (calls.append(1), decode(*args, **more))[1])
    before = [p.detach().clone() for p in made.trainer.model.parameters() if p.requires_grad]
    made.trainer.train()
    assert len(calls) == 2  # two batches of two prompts
    assert len(kept.traces) == 6
    for later in (2, 4):
        for step in (0, 1):
            assert kept.traces[step + later] is kept.traces[step]
    assert not torch.equal(kept.traces[0].completion_ids, kept.traces[1].completion_ids)
    after = [p for p in made.trainer.model.parameters() if p.requires_grad]
    assert not all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_rollouts_are_the_base_model_s_whatever_the_adapter_says(recipe, tmp_path):
    made, plain = learner(recipe, tmp_path / "a"), learner(recipe, tmp_path / "b", base_prompts=None)
    shake(made.trainer.model, size=2.0)
    asked = [tokenizer()(row["prompt"])["input_ids"] for row in made.trainer.train_dataset][:2]
    prompts = [ids for ids in asked for _ in range(8)]
    found = made.trainer.draw(made.trainer.model, prompts)
    head = read_unembedding(plain.trainer.model, tokenizer(), check=False)
    base = plain.trainer.model.get_base_model()
    luck = plain.trainer._luck(len(prompts))
    expected = sample(base, prompts, sampler=plain.trainer._sampler, unembedding=head, luck=luck)
    assert torch.equal(found.completion_ids, expected.completion_ids)
    assert torch.equal(found.delta, expected.delta)
    made.trainer.state.global_step = 9  # another step, the same rollouts
    assert made.trainer.draw(made.trainer.model, prompts) is found
    other = made.trainer.draw(made.trainer.model, prompts[8:] + prompts[:8])
    assert other is not found


def test_the_trainer_with_a_policy_of_its_own_draws_anew(recipe, tmp_path):
    made = learner(recipe, tmp_path, base_prompts=None)
    kept = Kept(made.trainer)
    made.trainer.train()
    assert len({id(trace) for trace in kept.traces}) == 6
    assert not isinstance(made.trainer, OfflineTrainer)


def test_the_data_hold_as_many_prompts_as_are_asked_for(recipe, tmp_path):
    assert len(learner(recipe, tmp_path).trainer.train_dataset) == 4
