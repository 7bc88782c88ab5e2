"""A recipe runs end to end on a tiny policy: complete records, nothing twice, one crash leaves the others standing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from forklora.recipes.report import read_arms
from forklora.recipes.run import is_done, run_recipe
from forklora.recipes.zero import deepspeed_settings
from safetensors.torch import load_file

from forklora.bases import Bases
from forklora.trace import Trace
from tiny_policy import LAYERS, recipe_of

FIELDS = {
    "status", "arm", "task", "seed", "recipe", "versions", "commit", "dirty", "hardware", "curve", "init_seconds",
    "target", "steps_to_target", "rollouts_to_target", "seconds_to_target", "eval_reward_start", "eval_reward_final",
    "peak_memory_bytes", "trained_parameters", "adapter_bytes", "step0_hash", "base_hash", "spectrum", "error",
    "ranks", "deepspeed",
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    recipe = recipe_of(folder)
    return recipe, Path(recipe.output), run_recipe(recipe)


def test_every_record_is_complete_and_true(finished):
    recipe, folder, records = finished
    assert [r["arm"] for r in records] == ["block", "plain"]
    for arm, record in zip(recipe.arms, records, strict=True):
        assert FIELDS <= record.keys()
        assert record["status"] == "done"
        assert record["error"] is None
        assert record["recipe"] == recipe.model_dump(mode="json")
        assert json.loads((folder / arm.name / "record.json").read_text()) == record
        curve = record["curve"]
        assert [p["step"] for p in curve] == [0, 1, 2]
        start = 16 if arm.adapter == "block" else 0  # rollouts that the bases cost
        assert [p["rollouts"] for p in curve] == [start, start + 8, start + 16]
        seconds = [p["seconds"] for p in curve]
        assert seconds == sorted(seconds)
        assert seconds[0] >= record["init_seconds"] - 1e-3 > 0
        assert curve[0]["train_reward"] is None
        assert all(0 <= p["train_reward"] <= 1 for p in curve[1:])
        assert all(0 <= p["eval_reward"] <= 1 for p in curve)
        assert (record["eval_reward_start"], record["eval_reward_final"]) == (
            curve[0]["eval_reward"], curve[-1]["eval_reward"],
        )  # fmt: skip
        reached = [p for p in curve if p["eval_reward"] >= 1.0]
        assert record["steps_to_target"] == (reached[0]["step"] if reached else None)
        assert record["peak_memory_bytes"] > 1e7
        assert record["versions"]["torch"]
        assert record["hardware"]["cores"] >= 1
    assert records[0]["trained_parameters"] == LAYERS * 6
    assert records[0]["spectrum"] == sorted(records[0]["spectrum"], reverse=True)
    assert records[1]["spectrum"] is None


def test_all_arms_start_as_the_same_function_and_leave_the_base_alone(finished):
    _, _, (block, plain) = finished
    assert block["step0_hash"] == plain["step0_hash"]
    assert block["base_hash"] == plain["base_hash"]
    assert block["curve"][0]["eval_reward"] == plain["curve"][0]["eval_reward"]


def test_the_folder_holds_what_the_layout_says(finished):
    recipe, folder, records = finished
    assert "<html" in (folder / "report.html").read_text()[:500].lower()
    for arm, record in zip(recipe.arms, records, strict=True):
        place = folder / arm.name
        weights = place / "adapter" / "adapter_model.safetensors"
        assert weights.stat().st_size == record["adapter_bytes"]
        assert len(load_file(weights)) == 2 * LAYERS
        trace = Trace.load(place / "trace" / "forks.safetensors")
        words = json.loads((place / "trace" / "tokens.json").read_text())["rows"]
        assert len(words) == len(trace) == 3
        assert [len(row["tokens"]) for row in words] == trace.completion_mask.sum(1).tolist()
        assert all(0 <= t["probability"] <= 1 and t["candidates"] for row in words for t in row["tokens"])
        assert not list(place.rglob("*.partial"))
    assert set(Bases.load(folder / "block" / "bases.safetensors")) == {
        n for n in Bases.load(folder / "block" / "bases.safetensors") if n.startswith("model.layers")
    }
    assert not (folder / "plain" / "bases.safetensors").exists()


def times(folder):
    return {p.parent.name: p.stat().st_mtime_ns for p in folder.glob("*/record.json")}


def test_a_second_run_repeats_nothing_and_a_deleted_record_one_arm(finished):
    recipe, folder, records = finished
    before = times(folder)
    assert run_recipe(recipe) == records
    assert times(folder) == before
    (folder / "plain" / "record.json").unlink()
    again = run_recipe(recipe)
    assert [r["status"] for r in again] == ["done", "done"]
    after = times(folder)
    assert after["block"] == before["block"]
    assert after["plain"] != before["plain"]
    # the same arm with the same seed takes the same path
    assert [p["eval_reward"] for p in again[1]["curve"]] == [p["eval_reward"] for p in records[1]["curve"]]
    assert again[1]["step0_hash"] == records[1]["step0_hash"]


def arm_with(recipe, **changes):
    return recipe.model_copy(update={"arms": (recipe.arms[0].model_copy(update=changes), recipe.arms[1])})


def test_done_means_a_finished_record_of_this_very_recipe(finished, tmp_path):
    recipe, _, _ = finished
    first = recipe.arms[0]
    assert is_done(recipe, first)
    for changed in (
        recipe.model_copy(update={"steps": 3}),
        recipe.model_copy(update={"seed": 1}),
        recipe.model_copy(update={"target": None}),
        recipe.model_copy(update={"sampling": recipe.sampling.model_copy(update={"temperature": 0.5})}),
        recipe.model_copy(update={"output": str(tmp_path)}),
        recipe.model_copy(update={"ranks": 2}),
        recipe.model_copy(update={"deepspeed": "zero2"}),
        arm_with(recipe, rate=0.2),
        arm_with(recipe, train_basis=True),
    ):
        assert not is_done(changed, changed.arms[0])
    # what the arm does not depend on may change
    assert is_done(recipe.model_copy(update={"description": "other words"}), first)
    assert is_done(recipe.model_copy(update={"arms": (first,)}), first)
    more = (*recipe.arms, first.model_copy(update={"name": "third"}))
    assert is_done(recipe.model_copy(update={"arms": more}), first)


@pytest.mark.parametrize("status", ["done", "failed", "interrupted", None])
def test_only_a_record_that_says_so_is_done(status, tmp_path):
    recipe = recipe_of(tmp_path)
    path = Path(recipe.output) / "block" / "record.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"status": status, "recipe": recipe.model_dump(mode="json")}))
    assert is_done(recipe, recipe.arms[0]) == (status == "done")


def test_a_record_from_before_there_were_ranks_counts_as_one_process(tmp_path):
    recipe = recipe_of(tmp_path)
    path = Path(recipe.output) / "block" / "record.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"status": "done", "recipe": recipe.model_dump(mode="json", exclude={"ranks"})}))
    assert is_done(recipe, recipe.arms[0])
    assert not is_done(recipe.model_copy(update={"ranks": 2}), recipe.arms[0])


def test_what_the_deepspeed_configuration_says_counts_not_its_name(tmp_path):
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps(deepspeed_settings("zero2")))
    recipe = recipe_of(tmp_path, deepspeed="zero2")
    path = Path(recipe.output) / "block" / "record.json"
    path.parent.mkdir(parents=True)
    content = {"status": "done", "deepspeed": deepspeed_settings("zero2"), "recipe": recipe.model_dump(mode="json")}
    path.write_text(json.dumps(content))
    assert is_done(recipe, recipe.arms[0])
    renamed = recipe.model_copy(update={"deepspeed": str(mine)})
    assert is_done(renamed, recipe.arms[0])
    mine.write_text(json.dumps(deepspeed_settings("zero2") | {"gradient_clipping": 3.0}))
    assert not is_done(renamed, recipe.arms[0])


@pytest.mark.parametrize("content", ['{"status": "done"}', '{"status": "done", "recipe": null}', "{", "[]", ""])
def test_an_unfinished_or_damaged_record_is_not_done(content, tmp_path):
    recipe = recipe_of(tmp_path)
    path = Path(recipe.output) / "block" / "record.json"
    assert not is_done(recipe, recipe.arms[0])
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert not is_done(recipe, recipe.arms[0])


@pytest.mark.slow
def test_an_arm_that_fails_says_why_and_the_others_go_on(tmp_path):
    recipe = arm_with(recipe_of(tmp_path, steps=0), targets=["nowhere"])
    failed, done = run_recipe(recipe)
    assert failed["status"] == "failed"
    assert "nowhere" in failed["error"]
    assert {"versions", "commit", "hardware", "recipe"} <= failed.keys()
    assert done["status"] == "done"
    assert [p["step"] for p in done["curve"]] == [0]
    assert done["eval_reward_start"] == done["eval_reward_final"]
    assert "nowhere" in (Path(recipe.output) / "report.html").read_text()


def test_a_killed_arm_leaves_a_failed_record(tmp_path, monkeypatch):
    recipe = recipe_of(tmp_path)
    recipe = recipe.model_copy(update={"arms": recipe.arms[:1]})
    start = subprocess.Popen

    def shot(command, **options):
        # the arm's own process, killed before its first line; anything else runs as asked
        mine = list(command[:3]) == [sys.executable, "-m", "forklora.recipes.launch"]
        return start([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"] if mine else command, **options)

    monkeypatch.setattr(subprocess, "Popen", shot)
    (record,) = run_recipe(recipe)
    assert record["status"] == "failed"
    assert "exit code -9" in record["error"]
    assert record["recipe"] == recipe.model_dump(mode="json")
    assert [r["arm"] for r, _ in read_arms(Path(recipe.output))] == ["block"]
    assert (Path(recipe.output) / "report.html").exists()
