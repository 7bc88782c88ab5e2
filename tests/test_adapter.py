"""The adapter's laws: it starts as nothing, trains what its kind says, stays in its span, leaves the base alone."""

import copy

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

from forklora.adapter import KINDS, ForkLoraConfig, add_fork_lora
from forklora.bases import LayerBasis
from forklora.optim import ProjectedSGD
from tiny_policy import (
    FORMS,
    LAYERS,
    adapted,
    deltas,
    fingerprints,
    gpt2,
    llama,
    logits,
    loss_of,
    orthonormal,
    random_bases,
    settings,
    shake,
    tokens,
    train,
    trainable,
)  # fmt: skip

# What the kind trains, and what it trains besides when the basis is trained too.
TRAINED = {
    "span": ({"lora_A.weight"}, {"lora_B.weight"}),
    "core": ({"lora_A.weight", "lora_B.core"}, {"lora_B.basis"}),
    "inputs": ({"lora_B.weight"}, {"lora_A.weight"}),
    "block": ({"lora_B.core"}, {"lora_B.basis", "lora_A.weight"}),
}
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.3}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}
MAKERS = {"llama": llama, "gpt2": gpt2}


def says(kind, trained):
    fixed, free = TRAINED[kind]
    return fixed | free if trained else fixed


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind, trained", FORMS)
def test_a_fresh_adapter_is_the_base_bit_for_bit(kind, trained, dtype, make):
    base = logits(make().to(dtype))
    model, _ = adapted(kind, model=make().to(dtype), train_basis=trained)
    assert torch.equal(logits(model), base)
    with model.disable_adapter():
        assert torch.equal(logits(model), base)


@pytest.mark.parametrize("kind, trained", FORMS)
def test_the_trained_tensors_are_what_the_kind_says_wherever_peft_sets_them(kind, trained, tmp_path):
    model, bases = adapted(kind, train_basis=trained)
    expected = says(kind, trained)
    assert trainable(model) == expected
    numbers = sum(p.requires_grad for p in model.parameters())
    assert numbers == LAYERS * len(expected)
    with model.disable_adapter():
        pass
    assert trainable(model) == expected
    shake(model)
    model.save_pretrained(tmp_path)
    model.load_adapter(tmp_path, "default", is_trainable=True)
    assert trainable(model) == expected
    add_fork_lora(model, ForkLoraConfig(**settings(kind, train_basis=trained)), bases, adapter_name="second")
    assert trainable(model) == expected
    model.set_adapter("second")
    assert trainable(model, "second") == expected
    model.set_adapter("default")
    assert trainable(model) == expected
    model.delete_adapter("second")
    assert trainable(model) == expected
    # what does not ask for a gradient does not move
    train(model, steps=1)
    assert {n.partition("lora_")[2] for n, p in model.named_parameters() if p.grad is not None} == {
        f"{name.removeprefix('lora_').replace('.', '.default.')}" for name in expected
    }


def test_two_fork_adapters_of_different_kinds_stand_side_by_side():
    model, bases = adapted("span")
    shake(model)
    one = logits(model)
    add_fork_lora(model, ForkLoraConfig(**settings("block", r=3)), bases, adapter_name="second")
    model.set_adapter("second")
    assert torch.equal(logits(model), logits(llama()))
    assert trainable(model, "second") == says("block", False)
    model.set_adapter("default")
    assert torch.equal(logits(model), one)
    assert trainable(model) == says("span", False)


def test_a_plain_lora_may_join_a_fork_adapter():
    model, _ = adapted("block")
    model.add_adapter("plain", LoraConfig(r=2, target_modules="all-linear"))
    model.set_adapter("plain")
    assert trainable(model, "plain") == {"lora_A.weight", "lora_B.weight"}
    model.set_adapter("default")
    assert trainable(model) == says("block", False)


def test_a_fork_adapter_on_plain_lora_layers_is_refused_before_anything_changes():
    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    names = [n for n, _ in model.named_parameters()]
    with pytest.raises(ValueError, match=r"self_attn.q_proj .*already .*plain LoRA"):
        add_fork_lora(model, ForkLoraConfig(), random_bases(llama()), adapter_name="fork")
    assert [n for n, _ in model.named_parameters()] == names
    assert list(model.peft_config) == ["default"]


@pytest.mark.parametrize("kind, trained", FORMS)
def test_a_bfloat16_base_gets_a_float32_adapter_whose_basis_is_not_rounded(kind, trained):
    model, bases = adapted(kind, model=llama(dtype=torch.bfloat16), train_basis=trained)
    ours = {n: t for n, t in [*model.named_parameters(), *model.named_buffers()] if "lora_" in n}
    assert {t.dtype for t in ours.values()} == {torch.float32}
    layer = "model.layers.1.mlp.down_proj"
    module = model.get_submodule(f"base_model.model.{layer}")
    output, input_ = bases[layer]
    if kind != "inputs":
        b = module.lora_B["default"]
        assert torch.equal(b.weight if kind == "span" else b.basis, output[:, : 2 if kind == "span" else 4])
    if kind in ("inputs", "block"):
        assert torch.equal(module.lora_A["default"].weight, input_[:, :2].T)


@pytest.mark.parametrize("kind, trained", FORMS)
def test_the_base_is_never_touched(kind, trained, tmp_path):
    before = fingerprints(llama())
    model, _ = adapted(kind, train_basis=trained)
    assert fingerprints(model) == before
    train(model, optimizer=torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    assert fingerprints(model) == before
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(llama()))
    model.save_pretrained(tmp_path)
    assert fingerprints(model) == before
    assert fingerprints(model.unload()) == before


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_update_stays_in_the_span_under_every_optimizer(kind, make, optimizer):
    model, bases = adapted(kind, model=make(), lora_alpha=6)
    train(model, steps=4, optimizer=OPTIMIZERS[optimizer][0], **OPTIMIZERS[optimizer][1])
    width = {"span": 2, "core": 4, "block": 4}.get(kind)
    for name, delta in deltas(model).items():
        u, q = (basis.double() for basis in bases[name])
        delta, size = delta.double(), delta.double().norm()
        assert size > 1e-4
        if width:
            u = u[:, :width]
            assert (delta - u @ (u.T @ delta)).norm() < 1e-6 * size
        if kind in ("inputs", "block"):
            q = q[:, :2]
            assert (delta - (delta @ q) @ q.T).norm() < 1e-6 * size
        assert torch.linalg.matrix_rank(delta, rtol=1e-5) <= 2


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_span_with_plain_sgd_is_projected_full_weight_sgd_step_by_step(make):
    rate, scale = 0.05, 1.5
    model, bases = adapted("span", model=make(), lora_alpha=2 * scale)
    dense = make()
    modules = dict(dense.named_modules())
    chosen = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate)
    start = {name: modules[name].weight.detach().clone() for name in bases}
    for step in range(3):
        for one in (model, dense):
            one.zero_grad()
            loss_of(one, tokens(seed=step)).backward()
        chosen.step()
        found = deltas(model)
        for name, (u, _) in bases.items():
            weight, u = modules[name].weight, u[:, :2]
            gradient = weight.grad if make is llama else weight.grad.T
            move = rate * scale**2 * (u @ (u.T @ gradient))
            with torch.no_grad():
                weight.sub_(move if make is llama else move.T)
            moved = weight - start[name]
            torch.testing.assert_close(found[name], moved if make is llama else moved.T, rtol=1e-4, atol=2e-6)


def test_span_equals_the_dense_optimizer_of_the_same_basis():
    scale = 2.0
    model, bases = adapted("span", lora_alpha=2 * scale)
    dense = llama()
    modules = dict(dense.named_modules())
    pairs = [(modules[name].weight, u[:, :2]) for name, (u, _) in bases.items()]
    start = {name: modules[name].weight.detach().clone() for name in bases}
    lora = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02, momentum=0.5)
    full = ProjectedSGD(pairs, lr=0.02 * scale**2, momentum=0.5)
    for step in range(3):
        for one, optimizer in ((model, lora), (dense, full)):
            one.zero_grad()
            loss_of(one, tokens(seed=step)).backward()
            optimizer.step()
    for name, delta in deltas(model).items():
        torch.testing.assert_close(delta, modules[name].weight - start[name], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("kind, trained", FORMS)
def test_merged_equals_unmerged_and_back(kind, trained, make, safe):
    model, _ = adapted(kind, model=make(), train_basis=trained, lora_alpha=3)
    shake(model)
    before, base = logits(model), logits(make())
    assert (before - base).abs().max() > 0.1
    model.merge_adapter(safe_merge=safe)
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)
    model.unmerge_adapter()
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)
    merged = model.merge_and_unload(safe_merge=safe)
    assert not any("lora" in n for n, _ in merged.named_modules())
    torch.testing.assert_close(logits(merged), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind, trained", FORMS)
def test_a_second_adapter_merges_beside_the_first(kind, trained):
    model, bases = adapted(kind, train_basis=trained)
    shake(model)
    config = ForkLoraConfig(**settings("span", lora_alpha=1))
    add_fork_lora(model, config, bases, adapter_name="second")
    model.base_model.set_adapter(["default", "second"])
    shake(model, seed=8)
    before = logits(model)
    model.merge_adapter(["default", "second"])
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)


def test_the_callers_bases_config_and_random_states_are_left_alone():
    base, own = llama(), random_bases(llama())
    kept = {name: tuple(side.clone() for side in sides) for name, sides in own.items()}
    config = ForkLoraConfig(**settings("block", train_basis=True, bases=own))
    before = copy.copy(vars(config))
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    model = add_fork_lora(base, config)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert all(vars(config)[key] is value or vars(config)[key] == value for key, value in before.items())
    train(shake(model), optimizer=torch.optim.AdamW, lr=0.01)
    assert all(torch.equal(a, b) for name in own for a, b in zip(own[name], kept[name], strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_every_shape_of_bases_gives_the_same_adapter(kind):
    bases = random_bases(llama())
    values = torch.ones(8)
    layers = {n: LayerBasis(u, values, q, values, 1.0, 1.0) for n, (u, q) in bases.items()}
    single = {n: (q if kind == "inputs" else u) for n, (u, q) in bases.items()}
    forms = [bases, layers, {n: list(sides) for n, sides in bases.items()}, *([single] if kind != "block" else [])]
    states = [get_peft_model_state_dict(shake(adapted(kind, bases=form)[0])) for form in forms]
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        assert all(torch.equal(state[key], states[0][key]) for key in state)


def test_dropout_is_the_adapters_only_and_off_in_evaluation():
    model, _ = adapted("inputs", lora_dropout=0.5)
    shake(model).eval()
    assert torch.equal(logits(model), logits(model))
    model.train()
    assert not torch.equal(logits(model), logits(model))


def test_gradient_reaches_a_basis_only_when_it_is_trained():
    for trained in (False, True):
        model, _ = adapted("core", train_basis=trained)
        shake(model)
        loss_of(model).backward()
        slot = model.get_submodule("base_model.model.model.layers.0.mlp.up_proj").lora_B["default"]
        assert (slot.basis.grad is not None) == trained
        assert torch.allclose(slot.core, slot.core.detach())


def test_orthonormal_is_what_it_says():
    u = orthonormal(9, 4, seed=3)
    torch.testing.assert_close(u.T @ u, torch.eye(4), rtol=0, atol=1e-6)
