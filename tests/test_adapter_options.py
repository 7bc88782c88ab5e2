"""What the configuration of a fork adapter allows, and what it refuses by name before anything is touched."""

import json
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from forklora.adapter import KINDS, ForkLoraConfig, add_fork_lora, target_layers
from tiny_policy import (
    adapted,
    deltas,
    gpt2,
    llama,
    logits,
    orthonormal,
    random_bases,
    settings,
    shake,
    train,
    trainable,
)

REFUSED = [
    ({"kind": "spam"}, "kind='spam' is not one of span, core, inputs, block"),
    ({"init_lora_weights": False}, "init_lora_weights=False"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
    ({"init_lora_weights": "gaussian"}, "init_lora_weights='gaussian'"),
    ({"use_dora": True}, "use_dora=True"),
    ({"lora_bias": True}, "lora_bias=True"),
    ({"bias": "all"}, "bias='all'"),
    ({"bias": "lora_only"}, "bias='lora_only'"),
    ({"use_qalora": True}, "use_qalora=True"),
    ({"target_parameters": ["mlp.experts"]}, "target_parameters=..mlp.experts"),
    ({"trainable_token_indices": [3]}, r"trainable_token_indices=\[3\]"),
    ({"layer_replication": [(0, 1)]}, "layer_replication="),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save=..lm_head"),
    ({"megatron_config": {"a": 1}}, "megatron_config="),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens="),
    ({"kind": "block", "r": 4, "width": 3}, "width=3 .* rank r=4"),
    ({"kind": "core", "r": 4, "width": 3}, "width=3 .* rank r=4"),
    ({"kind": "span", "width": 3}, "width=3 belongs to core and block"),
    ({"kind": "inputs", "width": 3}, "width=3 belongs to core and block"),
    ({"r": 0}, "r=0 .* 1 or more"),
    ({"layers_to_transform": [0]}, "layers_to_transform"),
]


@pytest.mark.parametrize("options, words", REFUSED, ids=[words[:24] for _, words in REFUSED])
def test_what_has_no_meaning_is_refused_by_name_at_construction(options, words):
    with pytest.raises(ValueError, match=words):
        ForkLoraConfig(**options)


def untouched(model):
    return not any("lora" in name for name, _ in model.named_modules())


def without(bases, layer):
    return {name: sides for name, sides in bases.items() if name != layer}


LAST = "model.layers.1.mlp.down_proj"
UNFIT = {
    "missing": (lambda b: without(b, LAST), rf"no basis for target layer {LAST}; there are bases for 13 layers"),
    "too few": (lambda b: b | {LAST: tuple(s[:, :1] for s in b[LAST])}, rf"{LAST}.* directions asked for.* has 1"),
    "wrong sizes": (
        lambda b: b | {LAST: b["model.layers.0.mlp.up_proj"]},
        rf"{LAST}.*\((48|32), 8\).* needs \[(48|32),",
    ),
    "not a matrix": (lambda b: b | {LAST: (torch.ones(32), torch.ones(48))}, rf"{LAST}.*\((32|48),\)"),
    "not orthonormal": (lambda b: b | {LAST: tuple(2 * s for s in b[LAST])}, rf"{LAST}.*, 8\) is not orthonormal.*qr"),
    "not finite": (lambda b: b | {LAST: tuple(s * torch.nan for s in b[LAST])}, rf"{LAST}.*not orthonormal"),
}


@pytest.mark.parametrize("case", UNFIT)
@pytest.mark.parametrize("kind", KINDS)
def test_an_unfit_basis_is_refused_with_layer_and_shapes(kind, case):
    change, words = UNFIT[case]
    model, base = llama(), logits(llama())
    with pytest.raises(ValueError, match=words):
        add_fork_lora(model, ForkLoraConfig(**settings(kind)), change(random_bases(llama())))
    assert torch.equal(logits(model), base)
    assert case not in ("missing", "wrong sizes", "not a matrix") or untouched(model)


def test_no_bases_at_all_names_the_ways_to_get_them():
    with pytest.raises(ValueError, match="has no bases.*attach.*Bases.load.*ForkGRPOTrainer"):
        get_peft_model(llama(), ForkLoraConfig())


@pytest.mark.parametrize("options", [{"target_modules": ["nowhere"]}, {"target_modules": "q_pro"}])
def test_a_pattern_that_matches_nothing_is_refused(options):
    model = llama()
    for make in (add_fork_lora, get_peft_model):
        with pytest.raises(ValueError, match=r"nowhere|q_pro"):
            make(model, ForkLoraConfig(**options, bases=random_bases(model)))
    assert untouched(model)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_the_embedding_and_the_head_are_refused(target, tied):
    targets = ["q_proj", target]
    bases = random_bases(llama()) | {"lm_head": (orthonormal(64, 4), orthonormal(32, 4))}
    for make in (add_fork_lora, get_peft_model):
        model = llama(tied=tied)
        with pytest.raises(ValueError, match=f"{target} is the embedding or the unembedding"):
            make(model, ForkLoraConfig(target_modules=targets, bases=bases))
    with pytest.raises(ValueError, match=f"{target} is the embedding"):
        target_layers(llama(tied=tied), ForkLoraConfig(target_modules=targets))


def test_a_head_is_recognized_by_what_it_is_and_not_by_its_name():
    model = llama(tied=False)
    model.unembed, model.get_output_embeddings = model.lm_head, lambda: model.unembed
    del model.lm_head
    with pytest.raises(ValueError, match="unembed is the embedding or the unembedding"):
        target_layers(model, ForkLoraConfig(target_modules=["unembed"]))


def test_layers_that_are_no_linear_maps_are_refused_by_name():
    model = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 4, 1))
    with pytest.raises(ValueError, match="1 is a Conv1d: fork adapters are for linear layers"):
        get_peft_model(model, ForkLoraConfig(target_modules=["0", "1"], bases={"0": orthonormal(4, 1)}))


@pytest.mark.parametrize("make", [llama, gpt2])
def test_all_linear_is_every_linear_layer_but_the_head(make):
    model = make()
    found = target_layers(model, ForkLoraConfig())
    linear = {n for n, m in model.named_modules() if type(m).__name__ in ("Linear", "Conv1D")} - {"lm_head"}
    assert set(found) == linear
    adapted_model, _ = adapted("span", model=make())
    assert set(deltas(adapted_model)) == linear


def test_target_layers_are_those_that_peft_adapts():
    cases = [
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": r".*layers\.1\.mlp\..*_proj"},
        {"target_modules": ["v_proj"], "layers_to_transform": [1]},
        {"exclude_modules": ["q_proj", "model.layers.0.mlp.up_proj"]},
        {"exclude_modules": r".*mlp.*"},
        {"target_modules": ["up_proj", "o_proj"], "layers_to_transform": 0},
    ]
    for options in cases:
        bases = random_bases(llama())
        expected = get_peft_model(llama(), LoraConfig(**{"target_modules": "all-linear"} | options))
        plain = {n.removeprefix("base_model.model.") for n, m in expected.named_modules() if hasattr(m, "lora_A")}
        model, _ = adapted("block", bases=bases, **options)
        assert set(deltas(model)) == set(target_layers(llama(), ForkLoraConfig(**options))) == plain
        # once wrapped, the same names
        assert set(target_layers(model, ForkLoraConfig(**options))) == plain
        assert trainable(model) == {"lora_B.core"}


@pytest.mark.parametrize("kind", KINDS)
def test_rank_and_alpha_patterns_and_rslora_scale_as_in_lora(kind):
    # 5 is more than the configured width of 4, which then grows with it
    options = {"rank_pattern": {"q_proj": 5}, "alpha_pattern": {"q_proj": 12, "v_proj": 8}, "lora_alpha": 6}
    model, bases = adapted(kind, **options)
    for name, module in ((n, m) for n, m in model.named_modules() if hasattr(m, "lora_A")):
        layer = name.rpartition(".")[2]
        rank = 5 if layer == "q_proj" else 2
        alpha = {"q_proj": 12, "v_proj": 8}.get(layer, 6)
        assert module.scaling["default"] == alpha / rank
        assert module.lora_A["default"].weight.shape == (rank, module.in_features)
        assert module.lora_B["default"].weight.shape == (module.out_features, rank)
    train(shake(model), steps=1)
    for name, delta in deltas(model).items():
        rank = 5 if name.endswith("q_proj") else 2
        assert torch.linalg.matrix_rank(delta, rtol=1e-5) == rank
    scaled, _ = adapted(kind, r=4, use_rslora=True)
    assert {m.scaling["default"] for m in scaled.modules() if hasattr(m, "lora_A")} == {4 / 4**0.5}


def test_the_default_scaling_is_one_and_rank_one():
    config = ForkLoraConfig()
    assert (config.kind, config.r, config.lora_alpha, config.target_modules) == ("span", 1, 1, "all-linear")
    assert (config.output_width, config.input_width) == (1, 0)
    core, block = ForkLoraConfig(kind="core", r=2), ForkLoraConfig(kind="block", r=3)
    assert (core.output_width, core.input_width) == (16, 0)
    assert (block.output_width, block.input_width) == (3, 3)
    assert ForkLoraConfig(kind="inputs", r=3).output_width == 0


def test_a_fan_out_first_layer_that_is_not_square_gets_its_sides_right():
    config = GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    model, bases = adapted("block", model=GPT2LMHeadModel(config).eval(), r=2, width=3)
    delta = deltas(shake(model))["transformer.h.0.mlp.c_fc"]
    assert delta.shape == (64, 16)
    u, q = bases["transformer.h.0.mlp.c_fc"]
    torch.testing.assert_close(u[:, :3] @ (u[:, :3].T @ delta @ q[:, :2]) @ q[:, :2].T, delta, rtol=1e-4, atol=1e-5)


def test_the_saved_configuration_is_a_lora_configuration():
    bases = random_bases(llama())
    config = ForkLoraConfig(**settings("block", bases=bases, train_basis=True))
    found = config.to_dict()
    assert set(found) == set(LoraConfig().to_dict())
    assert not {"kind", "width", "bases", "train_basis"} & set(found)
    assert config.bases is bases
    assert json.loads(json.dumps(found, default=list))["r"] == 2
    assert LoraConfig(**{k: v for k, v in found.items() if k not in ("auto_mapping", "peft_type")}).r == 2


def test_python_numpy_and_torch_random_states_are_left_alone():
    # In a process of its own: the checks of shapes in this one draw from Python's generator themselves.
    code = (
        "import random, numpy, torch; from torch import nn; from forklora import ForkLoraConfig, add_fork_lora; "
        "m = nn.Sequential(nn.Linear(8, 8)); c = ForkLoraConfig(target_modules=['0'], bases={'0': torch.eye(8)}); "
        "look = lambda: (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()); "
        "before = look(); add_fork_lora(m, c); raise SystemExit(0 if look() == before else 'moved')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
