"""Bases exchanged under training: the model stays the same, learns on in the new ones, and is saved as a plain LoRA."""

import pytest
import torch
from peft import PeftModel

from forklora.adapter import KINDS, ForkLoraConfig, add_fork_lora
from forklora.export import save_plain_lora
from forklora.slots import folded, make_room, put_bases, renew_bases
from tiny_policy import adapted, deltas, gpt2, llama, logits, random_bases, shake, train, trainable

LAST = "model.layers.1.mlp.down_proj"
ROUNDING = {"rtol": 1e-4, "atol": 2e-5}


def renewed(kind, *, times=2, model=None, **options):
    """A trained adapter whose bases were renewed, and trained on, this often."""
    model, _ = adapted(kind, model=model, **options)
    bare = model.get_base_model()
    others = [random_bases(type(bare)(bare.config), seed=100 + time) for time in range(times)]
    for time, bases in enumerate(others):
        renew_bases(shake(model, seed=time, size=0.1), bases)
    return shake(model, seed=99, size=0.1), others


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("kind", KINDS)
def test_renewing_leaves_the_model_and_what_it_trains_as_they_were(kind, make):
    model, _ = adapted(kind, model=make())
    names, before, learned = trainable(model), logits(shake(model)), deltas(model)
    renew_bases(model, random_bases(make(), seed=77))
    torch.testing.assert_close(logits(model), before, **ROUNDING)
    assert trainable(model) == names and folded(model) == 1
    found = deltas(model)
    for name, delta in learned.items():
        torch.testing.assert_close(found[name], delta, **ROUNDING)


@pytest.mark.parametrize("kind", KINDS)
def test_the_trained_numbers_start_anew_and_learn_in_the_new_bases(kind):
    model, _ = adapted(kind)
    bases = random_bases(llama(), seed=77)
    renew_bases(shake(model), bases)
    fresh, _ = adapted(kind, bases=bases)
    trained = dict(fresh.named_parameters())
    assert all(torch.equal(p, trained[name]) for name, p in model.named_parameters() if p.requires_grad)
    before = deltas(model)
    for name, delta in deltas(train(model)).items():
        learned, (output, input_) = delta - before[name], bases[name]
        assert learned.norm() > 0, name
        if kind != "inputs":
            k = 2 if kind == "span" else 4
            outside = learned - output[:, :k] @ (output[:, :k].T @ learned)
            assert outside.norm() <= 1e-4 * learned.norm(), name
        if kind in ("inputs", "block"):
            assert (learned - learned @ input_[:, :2] @ input_[:, :2].T).norm() <= 1e-4 * learned.norm(), name


@pytest.mark.parametrize("options", [{}, {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"v_proj": 5}}])
@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_saved_as_an_ordinary_lora_of_a_higher_rank(kind, rslora, options, tmp_path):
    model, _ = renewed(kind, use_rslora=rslora, lora_alpha=3, **options)
    expected = logits(model)
    for folder, save in (("ours", save_plain_lora), ("peft", lambda m, to: m.save_pretrained(to))):
        save(model, tmp_path / folder)
        plain = PeftModel.from_pretrained(llama(), tmp_path / folder)
        assert plain.peft_config["default"].r == 6
        torch.testing.assert_close(logits(plain), expected, **ROUNDING)


@pytest.mark.parametrize("kind", KINDS)
def test_merging_and_unmerging_take_all_of_it(kind):
    model, _ = renewed(kind)
    expected = logits(model)
    model.merge_adapter()
    torch.testing.assert_close(logits(model), expected, **ROUNDING)
    model.unmerge_adapter()
    torch.testing.assert_close(logits(model), expected, **ROUNDING)
    torch.testing.assert_close(logits(model.merge_and_unload()), expected, **ROUNDING)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_adapter_with_room_takes_it_in(kind, tmp_path):
    model, others = renewed(kind)
    model.save_pretrained(tmp_path)
    other, _ = adapted(kind, bases=others[-1])
    with pytest.raises(RuntimeError, match="size|expected"):
        other.load_adapter(tmp_path, "default", is_trainable=True)
    before = logits(shake(other))
    make_room(other, 2)
    torch.testing.assert_close(logits(other), before, **ROUNDING)
    other.load_adapter(tmp_path, "default", is_trainable=True)
    torch.testing.assert_close(logits(other), logits(model), **ROUNDING)
    torch.testing.assert_close(logits(train(other)), logits(train(model)), **ROUNDING)


def test_an_adapter_without_renewals_does_not_pass_for_one_with_them(tmp_path):
    for kind in KINDS:
        plain, bases = adapted(kind)
        plain.save_pretrained(tmp_path / kind)
        other, _ = adapted(kind, bases=bases)
        make_room(other, 1)
        before = logits(shake(other))
        with pytest.raises(RuntimeError, match="expected"):
            other.load_adapter(tmp_path / kind, "default", is_trainable=True)
        assert torch.equal(logits(other), before)


def test_of_several_adapters_the_named_one_is_renewed():
    model, bases = adapted("span")
    add_fork_lora(model, ForkLoraConfig(kind="inputs", r=3), bases, adapter_name="second")
    model.set_adapter("second")
    before = logits(shake(model))
    renew_bases(model, random_bases(llama(), seed=77), adapter_name="second")
    torch.testing.assert_close(logits(model), before, **ROUNDING)
    assert folded(model) == 0 and folded(model, adapter_name="second") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_bases_that_do_not_fit_change_nothing(kind):
    model, _ = adapted(kind)
    before = {n: t.clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    fewer = {n: sides for n, sides in random_bases(llama(), seed=77).items() if n != LAST}
    with pytest.raises(ValueError, match=f"no basis for target layer {LAST}"):
        renew_bases(shake(model), fewer)
    with pytest.raises(ValueError, match="no basis for target layer"):
        put_bases(model, fewer)
    after = dict([*model.named_parameters(), *model.named_buffers()])
    assert after.keys() == before.keys() and folded(model) == 0


def test_what_cannot_be_renewed_is_refused():
    bases = random_bases(llama(), seed=77)
    trained, _ = adapted("span", train_basis=True)
    with pytest.raises(ValueError, match="train_basis=True: .*nothing to renew"):
        renew_bases(trained, bases)
    merged, _ = adapted("span")
    merged.merge_adapter()
    with pytest.raises(ValueError, match="merged with its adapter: unmerge it"):
        renew_bases(merged, bases)
    with pytest.raises(ValueError, match="'default' is no fork adapter of the model; there are none"):
        renew_bases(llama(), bases)
    assert folded(llama()) == 0
