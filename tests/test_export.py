"""The exported adapter is an ordinary LoRA: it loads where this package cannot even be imported."""

import json
import os
import subprocess
import sys
from dataclasses import fields

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file

from forklora import export
from forklora.adapter import KINDS, ForkLoraConfig, add_fork_lora
from forklora.export import plain_lora, save_plain_lora
from tiny_policy import FORMS, LAYERS, adapted, gpt2, llama, logits, random_bases, settings, shake, tokens, trainable

# Loads every adapter in a process in which importing this package raises.
STRANGER = """
import json, sys
class Closed:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "forklora":
            raise ImportError("this package is not here")
sys.meta_path.insert(0, Closed())
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
root, found = sys.argv[1], {}
ids = load_file(f"{root}/ids.safetensors")["ids"]
for name, base in json.loads(sys.argv[2]).items():
    for sparing in (False, True):
        model = AutoModelForCausalLM.from_pretrained(f"{root}/{base}", dtype=torch.float32)
        model = PeftModel.from_pretrained(model, f"{root}/{name}", low_cpu_mem_usage=sparing).eval()
        with torch.no_grad():
            found[f"{name} {sparing}"] = model(ids).logits.contiguous()
assert not [m for m in sys.modules if m.startswith("forklora")]
save_file(found, f"{root}/logits.safetensors")
"""


def test_stock_peft_loads_every_kind_in_a_process_that_cannot_import_this_package(tmp_path):
    makers, asked, expected = {"llama": llama, "gpt2": gpt2}, {}, {}
    save_file({"ids": tokens()}, tmp_path / "ids.safetensors")
    for base, make in makers.items():
        make().save_pretrained(tmp_path / base)
        for kind, trained in FORMS:
            ranks = {"q_proj" if base == "llama" else "c_fc": 3}
            model, _ = adapted(kind, model=make(), train_basis=trained, lora_alpha=3, rank_pattern=ranks)
            name = f"{base}-{kind}-{trained}"
            save_plain_lora(shake(model), tmp_path / name)
            asked[name], expected[name] = base, logits(model)
    code = [sys.executable, "-c", STRANGER, str(tmp_path), json.dumps(asked)]
    run = subprocess.run(code, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert run.returncode == 0, run.stderr[-2000:]
    found = load_file(tmp_path / "logits.safetensors")
    assert len(found) == 2 * len(expected) == 32
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key.partition(" ")[0]], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind, trained", FORMS)
def test_the_files_hold_an_ordinary_lora_and_nothing_else(kind, trained, tmp_path):
    model, _ = adapted(kind, train_basis=trained, exclude_modules=["q_proj"])
    folder = save_plain_lora(shake(model), tmp_path / "deep" / "adapter")
    assert sorted(p.name for p in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert list(folder.parent.iterdir()) == [folder]
    config = json.loads((folder / "adapter_config.json").read_text())
    assert set(config) <= {f.name for f in fields(LoraConfig)}
    assert (config["peft_type"], config["r"], config["inference_mode"]) == ("LORA", 2, True)
    state = load_file(folder / "adapter_model.safetensors")
    assert len(state) == 2 * (LAYERS - 2)
    assert {key.rpartition("lora_")[2] for key in state} == {"A.weight", "B.weight"}
    assert {tuple(t.shape)[0 if "lora_A" in key else 1] for key, t in state.items()} == {2}
    assert {t.dtype for t in state.values()} == {torch.float32}


@pytest.mark.parametrize("kind, trained", FORMS)
def test_pefts_own_saving_writes_the_same(kind, trained, tmp_path):
    model, _ = adapted(kind, train_basis=trained)
    ours = save_plain_lora(shake(model), tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    one, other = (load_file(p / "adapter_model.safetensors") for p in (ours, tmp_path / "theirs"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    one, other = (json.loads((p / "adapter_config.json").read_text()) for p in (ours, tmp_path / "theirs"))
    for config in (one, other):
        config["target_modules"] = sorted(config["target_modules"])
        del config["auto_mapping"]  # PEFT notes the model's class there, for models without a task
    assert one == other


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("kind, trained", FORMS)
def test_a_saved_adapter_resumes_where_it_was(kind, trained, merge, tmp_path):
    model, bases = adapted(kind, train_basis=trained, lora_alpha=3)
    expected = logits(shake(model))
    if merge:
        model.merge_adapter()
    save_plain_lora(model, tmp_path)
    again, _ = adapted(kind, bases=bases, train_basis=trained, lora_alpha=3)
    before = trainable(again)
    again.load_adapter(tmp_path, "default", is_trainable=True)
    torch.testing.assert_close(logits(again), expected, rtol=1e-4, atol=2e-5)
    assert trainable(again) == before
    # and what is saved from there is what was loaded
    save_plain_lora(again, tmp_path / "again")
    one, other = (load_file(p / "adapter_model.safetensors") for p in (tmp_path, tmp_path / "again"))
    assert all(torch.allclose(one[key], other[key], atol=1e-5) for key in one)


@pytest.mark.parametrize("kind", ["span", "block"])
def test_a_saved_adapter_becomes_a_fork_adapter_again_through_from_pretrained(kind, tmp_path):
    model, bases = adapted(kind)
    expected = logits(shake(model))
    save_plain_lora(model, tmp_path)
    config = ForkLoraConfig(**settings(kind, bases=bases))
    again = PeftModel.from_pretrained(llama(), tmp_path, config=config, is_trainable=True)
    torch.testing.assert_close(logits(again), expected, rtol=1e-4, atol=2e-5)
    assert trainable(again) == trainable(model)


@pytest.mark.parametrize("kind", ["core", "block"])
def test_bases_that_do_not_fit_the_saved_adapter_are_told(kind, tmp_path):
    model, _ = adapted(kind)
    save_plain_lora(shake(model), tmp_path)
    other, _ = adapted(kind, bases=random_bases(llama(), seed=77))
    with pytest.raises(RuntimeError, match="outside the span of this layer's basis"):
        other.load_adapter(tmp_path, "default", is_trainable=True)


def test_of_several_adapters_the_named_one_is_written(tmp_path):
    model, bases = adapted("span")
    shake(model)
    add_fork_lora(model, ForkLoraConfig(**settings("inputs", r=3)), bases, adapter_name="second")
    assert json.loads((save_plain_lora(model, tmp_path / "a") / "adapter_config.json").read_text())["r"] == 2
    folder = save_plain_lora(model, tmp_path / "b", adapter_name="second")
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 3
    with pytest.raises(ValueError, match="no adapter 'third'; there are default, second"):
        save_plain_lora(model, tmp_path / "c", adapter_name="third")
    assert not (tmp_path / "c").exists()


class Stopped(RuntimeError):
    """The disk is full, or the machine goes down."""


@pytest.mark.parametrize("moment", ["tensors", "config"])
def test_an_interrupted_write_leaves_the_old_files(moment, tmp_path, monkeypatch):
    model, _ = adapted("block")
    folder = save_plain_lora(model, tmp_path / "adapter")
    old = {p.name: p.read_bytes() for p in folder.iterdir()}

    def stop(*_args, **_kwargs):
        raise Stopped

    if moment == "tensors":
        monkeypatch.setattr("safetensors.torch.save_file", stop)
    else:
        monkeypatch.setattr(export.json, "dumps", stop)
    with pytest.raises(Stopped):
        save_plain_lora(shake(model), folder)
    monkeypatch.undo()
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == old
    assert list(tmp_path.iterdir()) == [folder]
    save_plain_lora(model, folder)
    assert (folder / "adapter_model.safetensors").read_bytes() != old["adapter_model.safetensors"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", ["empty", "not finite"])
def test_empty_or_infinite_tensors_are_never_written(kind, damage, tmp_path):
    model, _ = adapted(kind)
    shake(model)
    slot = model.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    weight = slot.lora_A["default"].weight
    with torch.no_grad():
        weight.fill_(torch.inf) if damage == "not finite" else weight.set_(torch.empty(0))
    with pytest.raises(ValueError, match=r"1 of 28 adapter tensors are empty or not finite \(.*up_proj.*ZeRO-3"):
        save_plain_lora(model, tmp_path / "adapter")
    assert not list(tmp_path.iterdir())


def test_the_pieces_are_those_of_the_files(tmp_path):
    model, _ = adapted("core")
    config, state = plain_lora(shake(model))
    folder = save_plain_lora(model, tmp_path / "adapter")
    assert state.keys() == load_file(folder / "adapter_model.safetensors").keys()
    assert config.keys() == json.loads((folder / "adapter_config.json").read_text()).keys()
    assert not any(t.requires_grad for t in state.values())
