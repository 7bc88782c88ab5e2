"""Where a record comes from: hashes that see every bit of the base and nothing of an adapter."""

import json
import os

import pytest
import torch
from forklora.recipes.provenance import hash_logits, hash_tensors, provenance

from tiny_policy import adapted, eager, llama, logits, shake


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_hash_of_the_base_sees_one_bit_anywhere_and_no_adapter(dtype):
    found = hash_tensors(llama(dtype=dtype))
    assert found == hash_tensors(llama(dtype=dtype))
    assert found != hash_tensors(llama(dtype=dtype, seed=1))
    for kind in ("span", "block"):
        model, _ = adapted(kind, model=llama(dtype=dtype))
        assert hash_tensors(model) == found
        assert hash_tensors(shake(model)) == found
    for name, _ in llama().named_parameters():
        changed = llama(dtype=dtype)
        with torch.no_grad():
            weight = changed.get_parameter(name).view(-1)
            bits = weight[:1].view(torch.int16 if dtype == torch.bfloat16 else torch.int32)
            bits ^= 1
        assert hash_tensors(changed) != found, name


def test_the_hash_of_the_base_sees_buffers():
    model = llama()
    found = hash_tensors(model)
    next(b for n, b in model.named_buffers() if "inv_freq" in n)[0] += 1
    assert hash_tensors(model) != found


def test_the_hash_of_the_function_is_equal_for_equal_functions_only():
    ids = list(range(3, 12))
    found = hash_logits(llama(), ids)
    model, _ = adapted("core")
    assert hash_logits(model, ids) == found
    assert hash_logits(shake(model), ids) != found
    assert hash_logits(eager(llama(tied=False)), ids) != found
    assert hash_logits(llama(), ids[1:]) != found
    noisy = shake(adapted("inputs", lora_dropout=0.5)[0])
    assert len({hash_logits(noisy.train(), ids) for _ in range(3)}) == 1


def test_hashing_leaves_the_mode_and_the_random_state():
    model = llama().train()
    before = torch.get_rng_state()
    hash_logits(model, [3, 4])
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
    assert logits(model.eval()).isfinite().all()


def test_the_record_of_origin_is_plain_json_and_complete():
    found = provenance()
    assert json.loads(json.dumps(found)) == found
    assert set(found) == {"versions", "commit", "dirty", "hardware"}
    assert found["versions"]["torch"] == torch.__version__
    assert {"forklora", "transformers", "peft", "trl", "python"} <= found["versions"].keys()
    assert found["commit"] is None or len(found["commit"]) == 40
    assert found["hardware"]["memory_bytes"] > 1e8
    assert found["hardware"]["cores"] == os.cpu_count()


def test_outside_a_checkout_commit_and_dirty_are_null(monkeypatch, tmp_path):
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    found = provenance()
    assert (found["commit"], found["dirty"]) == (None, None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance()["commit"] is None
