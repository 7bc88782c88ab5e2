"""Two checkpoints are read weight by weight, and what does not belong together is refused by name."""

import json

import pytest
import torch
from forklora.recipes.pairs import WeightPairs
from forklora.recipes.refusal import Refusal
from safetensors.torch import save_file

from tiny_policy import llama


def saved(folder, model, **options):
    model.save_pretrained(folder, **options)
    return str(folder)


def moved(model, by=0.25):
    with torch.no_grad():
        for p in model.parameters():
            p += by * torch.randn(p.shape, generator=torch.Generator().manual_seed(7))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_is_met_once_with_its_change(tmp_path, dtype):
    before, after = llama(tied=False, dtype=dtype), moved(llama(tied=False, dtype=dtype))
    pairs = WeightPairs(saved(tmp_path / "a", before), saved(tmp_path / "b", after, max_shard_size="8KB"))
    old, new = before.state_dict(), after.state_dict()
    assert sorted(pair.name for pair in pairs) == sorted(old) and len(pairs) == len(old)
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 1
    assert pairs.only_base == pairs.only_tuned == []
    for pair in pairs:
        assert torch.equal(pair.before(), old[pair.name]) and torch.equal(pair.after(), new[pair.name])
        assert pair.delta().dtype == torch.float64
        assert torch.equal(pair.delta(), new[pair.name].double() - old[pair.name].double())


def test_tied_weights_count_once(tmp_path):
    pairs = WeightPairs(saved(tmp_path / "a", llama(tied=True)), saved(tmp_path / "b", moved(llama(tied=True))))
    assert len([name for name in pairs.names if "embed" in name or "lm_head" in name]) == 1


def test_what_stands_on_one_side_is_named(tmp_path):
    a, b = {"x": torch.ones(2), "y": torch.ones(2)}, {"y": torch.zeros(2), "z": torch.ones(2)}
    for name, tensors in (("a", a), ("b", b)):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    pairs = WeightPairs(str(tmp_path / "a"), str(tmp_path / "b"))
    assert (pairs.names, pairs.only_base, pairs.only_tuned) == (["y"], ["x"], ["z"])
    (pair,) = pairs
    assert pair.delta().tolist() == [-1, -1]


def test_models_that_do_not_belong_together_are_refused(tmp_path):
    base = saved(tmp_path / "a", llama(tied=False))
    with pytest.raises(Refusal, match=r"\[64, 48\]|\[\d+, 48\]"):
        WeightPairs(base, saved(tmp_path / "wide", llama(tied=False, width=48, heads=4)))
    (tmp_path / "other").mkdir()
    save_file({"w": torch.ones(1)}, tmp_path / "other" / "model.safetensors")
    with pytest.raises(Refusal, match="other architectures"):
        WeightPairs(base, str(tmp_path / "other"))


def test_checkpoints_that_cannot_be_read_are_refused_with_the_way_out(tmp_path):
    base = saved(tmp_path / "a", llama(tied=False))
    with pytest.raises(Refusal, match="is no folder, and no hub model"):
        WeightPairs(base, "no/such/model/anywhere")
    (tmp_path / "old").mkdir()
    torch.save({}, tmp_path / "old" / "pytorch_model.bin")
    with pytest.raises(Refusal, match="save_pretrained"):
        WeightPairs(base, str(tmp_path / "old"))
    short = tmp_path / "short"
    saved(short, llama(tied=False))
    file = short / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(Refusal, match="cut short"):
        WeightPairs(base, str(short))
    sharded = tmp_path / "sharded"
    saved(sharded, llama(tied=False), max_shard_size="8KB")
    next(sharded.glob("model-00002*")).unlink()
    with pytest.raises(Refusal, match="lacks 1 of its files, such as model-00002"):
        WeightPairs(base, str(sharded))
    config = tmp_path / "a" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"bits": 4}}))
    with pytest.raises(Refusal, match="quantized"):
        WeightPairs(base, base)


def test_weights_that_are_no_numbers_are_refused_when_they_are_read(tmp_path):
    broken = llama(tied=False)
    with torch.no_grad():
        broken.lm_head.weight[0, 0] = float("nan")
    pairs = WeightPairs(saved(tmp_path / "a", llama(tied=False)), saved(tmp_path / "b", broken))
    with pytest.raises(Refusal, match=r"lm_head\.weight holds NaN"):
        [pair.delta() for pair in pairs]
