"""DeepSpeed configurations: what ships is usable as it is, what would replace something without a word is refused."""

import json

import pytest
from forklora.recipes.refusal import Refusal
from forklora.recipes.zero import deepspeed_path, deepspeed_paths, deepspeed_settings

NAMES = ["zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"]


def written(folder, content):
    path = folder / "mine.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_all_stages_ship():
    assert list(deepspeed_paths()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_configuration_leaves_optimizer_and_precision_to_the_trainer(name):
    content = deepspeed_settings(name)
    assert not {"optimizer", "scheduler", "bf16", "fp16"} & content.keys()
    assert content["zero_allow_untested_optimizer"] is True
    assert content["communication_data_type"] == "fp32"
    zero = content["zero_optimization"]
    assert zero["stage"] == int(name[4])
    assert ("offload_optimizer" in zero) == name.endswith("offload")
    assert content.get("zero_force_ds_cpu_optimizer", True) != name.endswith("offload")
    assert zero.get("stage3_gather_16bit_weights_on_model_save", False) == (zero["stage"] == 3)


@pytest.mark.parametrize("name", NAMES)
def test_deepspeed_itself_knows_every_key(name):
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = {k: 100 if v == "auto" else v for k, v in deepspeed_settings(name)["zero_optimization"].items()}
    assert DeepSpeedZeroConfig(**zero).stage == zero["stage"]
    with pytest.raises(ValueError, match="stage4"):
        DeepSpeedZeroConfig(**zero, stage4=True)


def test_none_stays_none_and_a_file_goes_before_a_name(tmp_path, monkeypatch):
    assert deepspeed_settings(None) is None
    monkeypatch.chdir(tmp_path)
    written(tmp_path, {"steps_per_print": 7}).rename(tmp_path / "zero2")
    assert deepspeed_settings("zero2") == {"steps_per_print": 7}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not readable JSON"),
        ("[]", "holds no keys"),
        ({"optimizer": {"type": "AdamW"}}, "'optimizer' would replace the optimizer of every arm"),
        ({"scheduler": {"type": "WarmupLR"}}, "'scheduler' would replace the schedule of every arm"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "'zero_force_ds_cpu_optimizer' to false"),
        ({"bf16": {"enabled": True}}, "'bf16.enabled' would cast the adapter"),
        ({"fp16": {"enabled": True}}, "'fp16.enabled' would cast the adapter"),
    ],
)
def test_what_would_go_wrong_is_refused_with_the_key_and_the_way_out(content, says, tmp_path):
    with pytest.raises(Refusal, match="mine.json") as caught:
        deepspeed_settings(written(tmp_path, content))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        {"bf16": {"enabled": False}},
        {"bf16": {"enabled": "auto"}},
        {"zero_optimization": {"offload_optimizer": {"device": "none"}}},
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "zero_force_ds_cpu_optimizer": False},
    ],
)
def test_what_changes_nothing_is_taken(content, tmp_path):
    assert deepspeed_settings(written(tmp_path, content)) == content


def test_an_unknown_name_is_answered_with_the_nearest_and_all_names():
    with pytest.raises(Refusal, match=r"did you mean 'zero2_offload'") as caught:
        deepspeed_path("zero2-offload")
    assert all(name in str(caught.value) for name in NAMES)


def test_a_binary_file_is_refused(tmp_path):
    path = tmp_path / "mine.json"
    path.write_bytes("{}".encode("utf-16"))
    with pytest.raises(Refusal, match="not readable JSON"):
        deepspeed_settings(path)
