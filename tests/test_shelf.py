"""A shelf gives each tensor as it is stored, sharded or not, and tells shapes without reading."""

import pytest
import torch
from forklora.recipes.refusal import Refusal
from forklora.recipes.shelf import Shelf, read_json

from tiny_policy import llama


@pytest.mark.parametrize("size", ["1GB", "8KB"])
def test_tensors_come_back_bit_for_bit(tmp_path, size):
    model = llama(tied=False, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size=size)
    shelf, expected = Shelf(str(tmp_path)), model.state_dict()
    assert set(shelf) == set(expected) and len(shelf) == len(expected)
    for name, value in expected.items():
        assert torch.equal(shelf[name], value) and shelf[name].dtype == value.dtype
        assert shelf.shape(name) == list(value.shape) and shelf.floats(name)


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_file_that_holds_no_mapping_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(Refusal, match="config.json"):
        read_json(tmp_path / "config.json")
