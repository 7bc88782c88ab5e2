"""One call puts the adapter on: from prompts, from saved bases or from any tensors."""

import pytest
import torch
from peft import PeftModel

from forklora.adapter import KINDS, ForkLoraConfig
from forklora.attachment import attach, needed
from forklora.bases import BasisConfig, collect_bases
from forklora.rollouts import Sampler
from tiny_policy import fingerprints, llama, logits, prompts, random_bases, settings, shake, tokenizer, trainable

SAMPLER = Sampler(max_new_tokens=6, stop_ids=(1,))
QUICK = BasisConfig(group=4, batch=4, progress=False)


@pytest.mark.parametrize("kind", KINDS)
def test_from_prompts_it_collects_what_the_kind_needs(kind):
    model, base, before = llama(), logits(llama()), fingerprints(llama())
    state = torch.get_rng_state()
    config = ForkLoraConfig(**settings(kind))
    found = attach(model, config, tokenizer=tokenizer(), prompts=prompts()["prompt"], sampler=SAMPLER, collect=QUICK)
    assert torch.equal(torch.get_rng_state(), state)
    assert isinstance(found, PeftModel)
    assert torch.equal(logits(found), base)
    assert fingerprints(found) == before
    assert config.bases is None
    assert trainable(found)


def test_the_three_ways_give_the_same_adapter(tmp_path):
    config = ForkLoraConfig(**settings("block"))
    wanted = needed(llama(), config, collect=QUICK)
    bases = collect_bases(llama(), tokenizer(), prompts()["prompt"], config=wanted, sampler=SAMPLER)
    bases.save(tmp_path / "bases.safetensors")
    ways = [
        {"bases": bases},
        {"bases": tmp_path / "bases.safetensors"},
        {"bases": str(tmp_path / "bases.safetensors")},
        {"prompts": prompts()["prompt"], "tokenizer": tokenizer(), "sampler": SAMPLER, "collect": QUICK},
    ]
    outputs = [logits(shake(attach(llama(), config, **way))) for way in ways]
    assert all(torch.equal(found, outputs[0]) for found in outputs[1:])


def test_needed_asks_for_enough_directions_of_the_target_layers_only():
    targets = ["q_proj", "down_proj"]
    wide = needed(llama(), ForkLoraConfig(kind="block", r=2, width=5, target_modules=targets))
    assert (wide.output, wide.input) == (5, 2)
    assert len(wide.layers) == 4
    assert {name.rpartition(".")[2] for name in wide.layers} == set(targets)
    most = needed(llama(), ForkLoraConfig(kind="block", r=2, rank_pattern={"q_proj": 7}))
    assert (most.output, most.input) == (7, 7)
    assert needed(llama(), ForkLoraConfig(kind="core")).output == 16
    kept = needed(llama(), ForkLoraConfig(), collect=BasisConfig(seed=9, group=3))
    assert (kept.seed, kept.group, kept.output) == (9, 3, 1)


@pytest.mark.parametrize(
    "given, words",
    [
        ({}, "either bases .* or prompts"),
        ({"bases": {}, "prompts": ["1"]}, "either bases .* or prompts"),
        ({"prompts": ["1"]}, "without a sampler"),
        ({"bases": {}}, "no basis for target layer"),
    ],
)
def test_what_is_missing_is_named(given, words):
    with pytest.raises(ValueError, match=words):
        attach(llama(), ForkLoraConfig(), **given)


def test_a_model_with_an_adapter_is_collected_from_as_it_stands():
    plain, config = llama(), BasisConfig(output=3, input=3, group=4, batch=4, progress=False)
    fresh = attach(llama(), ForkLoraConfig(kind="block", r=2), bases=random_bases(llama()))
    makers = (lambda: plain, lambda: fresh, lambda: shake(fresh))
    one, other, moved = (
        collect_bases(make(), tokenizer(), prompts()["prompt"], config=config, sampler=SAMPLER) for make in makers
    )
    assert list(one) == list(other) == list(moved)
    for name in one:
        torch.testing.assert_close(other[name].output, one[name].output, rtol=0, atol=1e-3)
        assert (moved[name].output - one[name].output).norm() > 0.1


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="none"):
        attach(llama(), ForkLoraConfig(), bases=tmp_path / "none.safetensors")


def test_a_model_that_has_the_adapter_already_is_refused_and_keeps_it():
    model = attach(llama(), ForkLoraConfig(), bases=random_bases(llama()))
    before = logits(shake(model))
    with pytest.raises(ValueError, match="'default' already exists"):
        attach(model, ForkLoraConfig(), bases=random_bases(llama()))
    assert torch.equal(logits(model), before)
