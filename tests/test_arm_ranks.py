"""An arm of several ranks is the same arm: same step, same figures, one record, and no deadlock when one fails."""

import dataclasses
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from forklora.recipes.run import is_done, run_recipe
from forklora.recipes.zero import deepspeed_settings
from safetensors.torch import load_file

from rank_processes import gone, started
from tiny_policy import LAYERS, guessing, llama, recipe_of

SAME = ("step0_hash", "base_hash", "trained_parameters", "adapter_bytes", "eval_reward_start", "target")


def recipe_with(folder, arms, **changes):
    """A tiny recipe whose answers are sometimes right, with the given arms, ranks and DeepSpeed configuration."""
    recipe = recipe_of(folder, policy=guessing(llama(tied=False)))
    content = recipe.model_dump(mode="json") | changes
    content["task"]["options"] = {"low": 0, "high": 2, "shots": 1}
    content["evaluation"] |= {"prompts": 70}
    content["arms"] = [arm for arm in content["arms"] if arm["name"] in arms]
    content["output"] = str(folder / "-".join(["run", *map(str, changes.values())]))
    return type(recipe).model_validate(content)


@dataclasses.dataclass
class Finished:
    """A recipe that has run: its records by arm, and the adapter of each arm."""

    records: dict
    adapters: dict

    @classmethod
    def of(cls, folder, arms, **changes):
        recipe = recipe_with(folder, arms, **changes)
        records = {record["arm"]: record for record in run_recipe(recipe)}
        assert {name: record["error"] for name, record in records.items()} == dict.fromkeys(arms)
        for arm in recipe.arms:
            assert records[arm.name]["ranks"] == recipe.ranks
            assert records[arm.name]["deepspeed"] == deepspeed_settings(recipe.deepspeed)
            assert is_done(recipe, arm)
        files = {name: Path(recipe.output) / name / "adapter" / "adapter_model.safetensors" for name in arms}
        return cls(records, {name: load_file(file) for name, file in files.items()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """For one process, too: ranks have a thread each here, and hashes of logits depend on it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def alone(folder):
    """What one process finds."""
    return Finished.of(folder, ["block", "plain"])


def check(found, alone, *, arm):
    """Same start, same base, whole adapter; where no bases are collected, the same curve and adapter up to rounding."""
    record, expected = found.records[arm], alone.records[arm]
    assert {key: record[key] for key in SAME} == {key: expected[key] for key in SAME}
    assert [(p["step"], p["rollouts"]) for p in record["curve"]] == [
        (p["step"], p["rollouts"]) for p in expected["curve"]
    ]
    assert len(found.adapters[arm]) == 2 * LAYERS
    assert all(tensor.isfinite().all() and tensor.numel() for tensor in found.adapters[arm].values())
    assert any(tensor.any() for name, tensor in found.adapters[arm].items() if "lora_B" in name)
    if arm == "block":  # ranks draw rollouts of their own for their bases
        return
    assert 0 < record["eval_reward_start"] < 1 and any(p["train_reward"] for p in record["curve"])
    for key in ("train_reward", "eval_reward"):
        assert [p[key] for p in record["curve"]] == pytest.approx([p[key] for p in expected["curve"]])
    for name, tensor in found.adapters[arm].items():
        assert torch.allclose(tensor, alone.adapters[arm][name], rtol=1e-3, atol=1e-5), name


@pytest.mark.slow
def test_two_ranks_under_zero2_train_and_leave_one_record(folder):
    found = Finished.of(folder, ["plain"], deepspeed="zero2", ranks=2)
    record = found.records["plain"]
    assert [p["step"] for p in record["curve"]] == [0, 1, 2]
    assert record["trained_parameters"] == sum(tensor.numel() for tensor in found.adapters["plain"].values())
    assert any(tensor.any() for name, tensor in found.adapters["plain"].items() if "lora_B" in name)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("deepspeed", [None, "zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"])
def test_any_ranks_under_any_stage_are_the_same_arm(deepspeed, ranks, folder, alone):
    if (deepspeed, ranks) == (None, 1):
        pytest.skip("that is the arm itself")
    arms = ["block", "plain"] if ranks == 2 else ["plain"]
    found = Finished.of(folder, arms, deepspeed=deepspeed, ranks=ranks)
    for arm in arms:
        check(found, alone, arm=arm)


@pytest.mark.slow
def test_a_model_s_own_weights_learn_under_deepspeed_as_without(folder):
    recipes = [recipe_with(folder, ["plain"], deepspeed=deepspeed, seed=7) for deepspeed in (None, "zero2")]
    arm = {"name": "full", "adapter": "full", "optimizer": "sgd", "rate": 0.01, "centering": "none"}
    changes = {"arms": [arm], "outcome": {"samples": 2, "kl_prompts": 2}}
    records = []
    for recipe in recipes:
        content = recipe.model_dump(mode="json") | changes | {"output": f"{recipe.output}-full"}
        records += run_recipe(type(recipe).model_validate(content, strict=False))
    alone, engine = records
    assert alone["error"] is engine["error"] is None
    assert alone["step0_hash"] == engine["step0_hash"]
    for key in ("train_reward", "eval_reward"):
        assert [p[key] for p in engine["curve"]] == pytest.approx([p[key] for p in alone["curve"]])
    moved = [record["outcome"]["update"]["norm"] for record in records]
    assert moved[0] > 0 and moved[1] == pytest.approx(moved[0], rel=1e-3)


FAILING = """
import os, signal
if os.environ.get("RANK") == "1":
    def fail(*_):
        raise RuntimeError("the disk is gone")
    signal.signal(signal.SIGALRM, fail)
"""


@pytest.mark.slow
@pytest.mark.parametrize("deepspeed", ["zero2", "null"])
def test_the_first_rank_to_fail_says_why_and_nobody_waits_for_it(deepspeed, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(FAILING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run, ranks, below = started(tmp_path, "ranks=2", f"deepspeed={deepspeed}")
    limit = time.monotonic() + 90
    while not (tmp_path / "run" / "plain" / "trace" / "tokens.json").exists() and time.monotonic() < limit:
        time.sleep(0.2)
    time.sleep(3)  # into the training
    (second,) = (p for p in ranks if p.environ()["RANK"] == "1")
    os.kill(second.pid, signal.SIGALRM)
    run.communicate(timeout=60)
    assert run.returncode == 1
    assert gone(below, within=5)
    record = json.loads((tmp_path / "run" / "plain" / "record.json").read_text())
    assert record["status"] == "failed"
    assert record["error"] == "rank 1: RuntimeError: the disk is gone"
