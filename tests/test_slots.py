"""Bases put into an adapter that stands already: frozen factors only, all of them or none."""

import pytest
import torch

from forklora.adapter import KINDS, ForkLoraConfig, add_fork_lora
from forklora.export import save_plain_lora
from forklora.slots import put_bases
from tiny_policy import FORMS, adapted, llama, logits, orthonormal, random_bases, settings, shake, train

LAST = "model.layers.1.mlp.down_proj"


def tensors(model):
    return {n: t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}


@pytest.mark.parametrize("kind", KINDS)
def test_the_adapter_is_the_one_that_these_bases_make(kind):
    other = random_bases(llama(), seed=77)
    model, _ = adapted(kind, rank_pattern={"q_proj": 3})
    expected, _ = adapted(kind, bases=other, rank_pattern={"q_proj": 3})
    put_bases(shake(model), other)
    shake(expected)
    found, wanted = tensors(model), tensors(expected)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in found)
    # and it trains on as that one does
    assert torch.equal(logits(train(model)), logits(train(expected)))


@pytest.mark.parametrize("kind", ["core", "block"])
def test_a_saved_adapter_is_read_in_the_bases_it_was_trained_in(kind, tmp_path):
    model, bases = adapted(kind)
    expected = logits(shake(model))
    save_plain_lora(model, tmp_path)
    resumed, _ = adapted(kind, bases=random_bases(llama(), seed=77))
    put_bases(resumed, bases)
    resumed.load_adapter(tmp_path, "default", is_trainable=True)
    torch.testing.assert_close(logits(resumed), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind, trained", FORMS)
def test_trained_numbers_and_the_base_are_left_alone(kind, trained):
    model, _ = adapted(kind, train_basis=trained)
    before = tensors(shake(model))
    put_bases(model, random_bases(llama(), seed=77))
    changed = {n.partition("lora_")[2] for n, t in tensors(model).items() if not torch.equal(t, before[n])}
    frozen = {
        "span": {"B.default.weight"},
        "core": {"B.default.basis"},
        "inputs": {"A.default.weight"},
        "block": {"A.default.weight", "B.default.basis"},
    }
    assert changed == (set() if trained else frozen[kind])


def test_of_several_adapters_the_named_one_gets_them():
    model, bases = adapted("span")
    add_fork_lora(model, ForkLoraConfig(**settings("inputs", r=3)), bases, adapter_name="second")
    before = tensors(model)
    put_bases(model, random_bases(llama(), seed=77), adapter_name="second")
    changed = {n.partition("lora_")[2] for n, t in tensors(model).items() if not torch.equal(t, before[n])}
    assert changed == {"A.second.weight"}


UNFIT = {
    "missing": (lambda b: {n: s for n, s in b.items() if n != LAST}, f"no basis for target layer {LAST}"),
    "too few": (lambda b: b | {LAST: tuple(s[:, :1] for s in b[LAST])}, f"{LAST}, .* has 1"),
    "wrong sizes": (lambda b: b | {LAST: (orthonormal(5, 4), orthonormal(5, 4))}, rf"{LAST}.*\(5, 4\)"),
    "not orthonormal": (lambda b: b | {LAST: tuple(2 * s for s in b[LAST])}, f"{LAST}.*not orthonormal"),
}


@pytest.mark.parametrize("case", UNFIT)
@pytest.mark.parametrize("kind", KINDS)
def test_bases_that_do_not_fit_are_refused_and_change_nothing(kind, case):
    change, words = UNFIT[case]
    model, _ = adapted(kind)
    before = tensors(model)
    with pytest.raises(ValueError, match=words):
        put_bases(model, change(random_bases(llama(), seed=77)))
    assert all(torch.equal(t, before[n]) for n, t in tensors(model).items())


def test_other_adapters_and_merged_ones_are_refused():
    model, bases = adapted("span")
    with pytest.raises(ValueError, match="'third' is no fork adapter of the model; there are default"):
        put_bases(model, bases, adapter_name="third")
    model.merge_adapter()
    with pytest.raises(ValueError, match="merged with its adapter: unmerge it"):
        put_bases(model, bases)
