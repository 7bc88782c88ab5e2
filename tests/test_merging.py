"""An adapter's weights are what PEFT makes of them when it merges them into a loaded base."""

import pytest
import torch
from forklora.recipes.pairs import WeightPairs
from forklora.recipes.refusal import Refusal
from peft import (
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from transformers import AutoModelForCausalLM

from forklora.export import save_plain_lora
from tiny_policy import adapted, gpt2, llama, shake

LINEAR = {"target_modules": ["q_proj", "down_proj"]}
KINDS = {
    "lora": LoraConfig(r=2, init_lora_weights=False, rank_pattern={"q_proj": 3}, use_rslora=True, **LINEAR),
    "dora": LoraConfig(r=2, init_lora_weights=False, use_dora=True, **LINEAR),
    "loha": LoHaConfig(r=2, init_weights=False, **LINEAR),
    "lokr": LoKrConfig(r=2, init_weights=False, **LINEAR),
    "vera": VeraConfig(r=2, init_weights=False, **LINEAR),
    "embedding": LoraConfig(r=2, init_lora_weights=False, target_modules=["embed_tokens", "q_proj"]),
    "saved": LoraConfig(r=2, init_lora_weights=False, modules_to_save=["norm"], **LINEAR),
    "biased": LoraConfig(r=2, init_lora_weights=False, lora_bias=True, target_modules=["c_attn"]),
}


def bases(folder, config):
    model = gpt2() if "c_attn" in config.target_modules else llama(tied=False)
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_those_peft_makes(tmp_path, kind):
    base = bases(tmp_path / "base", KINDS[kind])
    untouched = AutoModelForCausalLM.from_pretrained(base).state_dict()
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), KINDS[kind])
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "modules_to_save" in name or "lora_B.default.bias" in name:
                p += 0.1
    model.save_pretrained(tmp_path / "adapter")
    state, pairs = torch.get_rng_state(), WeightPairs(base, str(tmp_path / "adapter"))
    found = {pair.name: pair.after() for pair in pairs}
    assert torch.equal(torch.get_rng_state(), state)
    merged = model.merge_and_unload().state_dict()
    changed = {name for name, value in untouched.items() if not torch.equal(value, merged[name])}
    assert set(found) == changed
    for name, after in found.items():
        assert torch.allclose(after.double(), merged[name].double(), rtol=1e-5, atol=2e-6), name
        assert not torch.allclose(after.double(), untouched[name].double(), atol=1e-3)
    again = {pair.name: pair.after() for pair in pairs}  # reading leaves nothing behind
    assert all(torch.equal(found[name], again[name]) for name in found)


def test_an_exported_fork_adapter_is_measured_like_any_lora(tmp_path):
    model, _ = adapted("block", model=llama(tied=False))
    shake(model)
    base = bases(tmp_path / "base", LoraConfig(target_modules=["q_proj"]))
    save_plain_lora(model, tmp_path / "adapter")
    found = {pair.name: pair.delta() for pair in WeightPairs(base, str(tmp_path / "adapter"))}
    for name, module in model.get_base_model().named_modules():
        if hasattr(module, "get_delta_weight"):
            delta = module.get_delta_weight("default").detach().double()
            assert torch.allclose(found.pop(f"{name}.weight"), delta, atol=1e-6)
    assert not found


def test_a_tiny_update_is_not_lost_in_the_rounding_of_its_base(tmp_path):
    base = bases(tmp_path / "base", LoraConfig(target_modules=["q_proj"]))
    model = get_peft_model(llama(tied=False), LoraConfig(r=1, init_lora_weights=False, target_modules=["q_proj"]))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p *= 1e-5 if "lora_B" in name else 1
    model.save_pretrained(tmp_path / "adapter")
    for pair in WeightPairs(base, str(tmp_path / "adapter")):
        values = torch.linalg.svdvals(pair.delta())
        assert 0 < values[0] < 1e-2
        assert values[1] < 1e-6 * values[0]


def test_adapters_that_do_not_say_what_became_of_the_base_are_refused(tmp_path):
    base = bases(tmp_path / "base", LoraConfig(target_modules=["q_proj"]))
    get_peft_model(llama(tied=False), LoraConfig(init_lora_weights="pissa", **LINEAR)).save_pretrained(tmp_path / "p")
    with pytest.raises(Refusal, match="path_initial_model_for_weight_conversion"):
        WeightPairs(base, str(tmp_path / "p"))
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    get_peft_model(llama(tied=False), prompt).save_pretrained(tmp_path / "q")
    with pytest.raises(Refusal, match="changes no weight"):
        WeightPairs(base, str(tmp_path / "q"))


def test_an_adapter_of_another_base_is_refused(tmp_path):
    base = bases(tmp_path / "base", LoraConfig(target_modules=["q_proj"]))
    wide = get_peft_model(llama(tied=False, width=48, heads=4), LoraConfig(**LINEAR))
    wide.save_pretrained(tmp_path / "wide")
    with pytest.raises(Refusal, match="does not fit"):
        WeightPairs(base, str(tmp_path / "wide"))
    get_peft_model(gpt2(), LoraConfig(target_modules=["c_attn"])).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(Refusal, match="does not fit"):
        WeightPairs(base, str(tmp_path / "gpt2"))
