"""Each linear layer's fate can be printed, and what a pattern does not match is told before anything is built."""

import pytest
import torch
from peft import get_peft_model

from forklora.adapter import KINDS, ForkLoraConfig, add_fork_lora
from forklora.targets import fate_table, layer_fates, target_layers
from tiny_policy import LAYERS, adapted, gpt2, llama, random_bases, settings

IDLE = {
    "target_modules": (["q_proj", "p_proj"], "target_modules: 'p_proj' is the name of no module"),
    "exclude_modules": (["q_porj"], "exclude_modules: 'q_porj' is the name of no module"),
    "rank_pattern": ({"q_porj": 2}, "rank_pattern: 'q_porj' matches none of 14 layers"),
    "alpha_pattern": ({"layers.7.*": 2}, "alpha_pattern: 'layers.7.*' matches none of 14"),
}


@pytest.mark.parametrize("field", IDLE)
def test_a_pattern_that_matches_nothing_is_refused_by_name(field):
    value, words = IDLE[field]
    with pytest.raises(ValueError, match=words.replace("*", r"\*")):
        target_layers(llama(), ForkLoraConfig(**{field: value}))
    with pytest.raises(ValueError, match=words.replace("*", r"\*")):
        add_fork_lora(llama(), ForkLoraConfig(**{field: value}), random_bases(llama()))


def test_a_rule_or_an_index_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match="exclude_modules='.*mpl.*' matches no module"):
        target_layers(llama(), ForkLoraConfig(exclude_modules=".*mpl.*"))
    for indices, missing in (([0, 7], 7), (7, 7)):
        with pytest.raises(ValueError, match=f"(index {missing}|matches no linear layer)"):
            target_layers(llama(), ForkLoraConfig(target_modules=["q_proj"], layers_to_transform=indices))


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_with_bases_at_hand_an_idle_pattern_is_refused_at_construction(field):
    bases = random_bases(llama())
    with pytest.raises(ValueError, match=f"{field}: 'q_porj' matches none of 14"):
        ForkLoraConfig(**{field: {"q_porj": 2}}, bases=bases)
    assert get_peft_model(llama(), ForkLoraConfig(**{field: {"q_proj": 2}}, bases=bases))


@pytest.mark.parametrize("kind", KINDS)
def test_the_fates_are_what_the_adapter_then_has(kind):
    options = {"rank_pattern": {"q_proj": 5}, "exclude_modules": ["up_proj"]}
    model, _ = adapted(kind, **options)
    fates = layer_fates(llama(tied=False), ForkLoraConfig(**settings(kind, **options)))
    assert fates == layer_fates(model, ForkLoraConfig(**settings(kind, **options))) or kind
    assert len(fates) == LAYERS + 1
    layers = dict(model.get_base_model().named_modules())
    for fate in fates:
        module = layers[fate.layer]
        assert bool(fate.skipped) != hasattr(module, "lora_A")
        if not fate.skipped:
            a, b = module.lora_A["default"].weight, module.lora_B["default"]
            assert fate.shape == (b.weight.shape[0], a.shape[1])
            frozen = {"span": b.weight.shape[1], "inputs": 0}
            assert fate.output == (frozen[kind] if kind in frozen else b.basis.shape[1])
            assert fate.input == (a.shape[0] if kind in ("inputs", "block") else 0)


def test_every_layer_that_is_left_alone_says_why():
    config = ForkLoraConfig(
        target_modules=["q_proj", "v_proj", "o_proj"], exclude_modules=["o_proj"], layers_to_transform=[1]
    )
    skipped = {fate.layer: fate.skipped for fate in layer_fates(llama(tied=False), config)}
    layer = "model.layers.{}.self_attn.{}"
    assert skipped["lm_head"] == "the unembedding, off whose rows the bases are read"
    assert skipped[layer.format(1, "o_proj")] == "named in exclude_modules"
    assert skipped[layer.format(0, "q_proj")] == "not in layers_to_transform"
    assert skipped[layer.format(1, "k_proj")] == "not in target_modules"
    assert skipped[layer.format(1, "q_proj")] == ""
    assert sum(not why for why in skipped.values()) == 2


def test_the_report_has_one_line_a_layer():
    fates = layer_fates(gpt2(), ForkLoraConfig(kind="block", r=2, width=3, exclude_modules=["c_attn"]))
    lines = fate_table(fates).splitlines()
    assert len(lines) == len(fates)
    assert lines[0] == "transformer.h.0.attn.c_attn   96 x 32  skipped: named in exclude_modules"
    assert lines[1] == "transformer.h.0.attn.c_proj   32 x 32  output basis 3, input basis 2"
    assert lines[-1].startswith("lm_head ") and "skipped: the unembedding" in lines[-1]
    assert fate_table([]) == ""


def test_a_model_without_embeddings_is_reported_too():
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4))
    fates = layer_fates(net, ForkLoraConfig(target_modules=["0"]))
    assert [(f.layer, f.shape, f.output, f.skipped) for f in fates] == [
        ("0", (6, 4), 1, ""),
        ("1", (4, 6), 0, "not in target_modules"),
    ]
