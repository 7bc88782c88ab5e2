"""Records in PEFT's schema: what their loader reads is there, survives its casts, and says what the record says."""

import json

import pandas as pd
import pytest
from forklora.recipes.config import resolved
from forklora.recipes.method_comparison import peft_record, write_peft_records

from tiny_policy import recipe_of

# Column of their table: (type it is cast to, path of its value); "last" is the last of the metrics.
COLUMNS = {
    "experiment_name": ("string", "run_info experiment_name"),
    "model_id": ("string", "run_info train_config model_id"),
    "train_config": ("string", "run_info train_config"),
    "peft_config": ("string", "run_info peft_config"),
    "accelerator_memory_reserved_avg": (int, "train_info accelerator_memory_reserved_avg"),
    "accelerator_memory_max": (int, "train_info accelerator_memory_max"),
    "accelerator_memory_reserved_99th": (int, "train_info accelerator_memory_reserved_99th"),
    "total_time": (float, "run_info total_time"),
    "train_time": (float, "train_info train_time"),
    "file_size": (int, "train_info file_size"),
    "test_accuracy": (float, "last test accuracy"),
    "train_loss": (float, "last train loss"),
    "train_samples": (int, "last train samples"),
    "train_total_tokens": (int, "last train total tokens"),
    "peft_version": ("string", "meta_info package_info peft-version"),
    "peft_branch": ("string", "run_info peft_branch"),
    "transformers_version": ("string", "meta_info package_info transformers-version"),
    "datasets_version": ("string", "meta_info package_info datasets-version"),
    "torch_version": ("string", "meta_info package_info torch-version"),
    "bitsandbytes_version": ("string", "meta_info package_info bitsandbytes-version"),
    "package_info": ("string", "meta_info package_info"),
    "system_info": ("string", "meta_info system_info"),
    "created_at": ("string", "run_info created_at"),
}


def value_at(row, path):
    """The value under a path of names, some of which hold spaces."""
    if path.startswith("last "):
        return row["train_info"]["metrics"][-1][path.removeprefix("last ")]
    for name in path.split(" "):
        row = row[name]
    return row


def loaded(rows):
    """A table as their loader makes it: failed runs left out, every column cast, times rounded, repeats dropped."""
    kept = [row for row in rows if row["train_info"]["status"] == "success"]
    table = pd.DataFrame([{name: value_at(row, path) for name, (_, path) in COLUMNS.items()} for row in kept])
    table["peft_type"] = [(row["run_info"]["peft_config"] or {"peft_type": "full"})["peft_type"] for row in kept]
    table = table.astype({name: kind for name, (kind, _) in COLUMNS.items()})
    table["created_at"] = pd.to_datetime(table["created_at"])
    for name in ("train_time", "total_time"):
        table[name] = table[name].round().astype(int)
    repeated = ["experiment_name", "model_id", "peft_type", "created_at"]
    return table.sort_values("created_at").drop_duplicates(repeated, keep="last")


def record_of(folder, *, name="plain", adapter="lora", seed=0, rate=0.01, **changes):
    """A record as a run of a comparison leaves it."""
    part = {"grid": "quick", "task": "easy", "round": changes.pop("round", "report")}
    arm = {"name": name, "adapter": adapter, "rank": 2, "alpha": 4.0, "optimizer": "adamw", "rate": rate}
    recipe = resolved(recipe_of(folder, part=part, arms=[arm], seed=seed))
    curve = [
        {"step": s, "rollouts": 32 + 8 * s, "seconds": 2.5 * s + 1, "train_reward": 0.5, "eval_reward": 0.25 * s}
        for s in range(3)
    ]
    content = {
        "status": "done", "error": None, "arm": name, "task": "multiplication", "seed": seed,
        "recipe": recipe.model_dump(mode="json"), "curve": curve, "eval_reward_final": 0.5, "init_seconds": 1.0,
        "trained_parameters": 1000, "adapter_bytes": 5000, "peak_memory_bytes": 123456789, "total_seconds": 20.4,
        "versions": {"torch": "2.9", "peft": "0.20", "transformers": "5.0", "datasets": "4.0", "python": "3.11"},
        "hardware": {"machine": "x86_64", "processor": "abacus", "accelerators": []},
        "outcome": {"accuracy": 0.4375, "pass_at": {"1": 0.4375}},
    }  # fmt: skip
    return content | changes


def test_their_loader_reads_what_the_record_says(tmp_path):
    table = loaded([peft_record(record_of(tmp_path))])
    (row,) = table.to_dict("records")
    assert row["model_id"] == str(tmp_path / "model")
    assert (row["peft_type"], row["test_accuracy"], row["train_samples"]) == ("LORA", 0.4375, 48)
    assert (row["train_time"], row["total_time"], row["file_size"]) == (6, 20, 5000)
    assert {row[f"accelerator_memory_{name}"] for name in ("max", "reserved_avg", "reserved_99th")} == {123456789}
    assert (row["peft_version"], row["torch_version"]) == ("0.20", "2.9")
    assert pd.isna(row["train_loss"]) and pd.isna(row["bitsandbytes_version"])


def test_what_was_not_measured_is_named(tmp_path):
    full = peft_record(record_of(tmp_path))
    assert full["forklora"]["not_measured"] == ["train loss", "train total tokens"]
    less = record_of(tmp_path, peak_memory_bytes=None, adapter_bytes=None)
    found = peft_record(less)
    assert found["forklora"]["not_measured"] == ["train loss", "train total tokens", "accelerator_memory", "file_size"]
    assert len(loaded([found])) == 1


def test_a_model_trained_itself_is_full_finetuning(tmp_path):
    found = peft_record(record_of(tmp_path, adapter="full", adapter_bytes=None))
    assert found["run_info"]["peft_config"] is None
    assert found["train_info"]["file_size"] == 4 * 1000
    assert "file_size" not in found["forklora"]["not_measured"]
    assert list(loaded([found])["peft_type"]) == ["full"]


@pytest.mark.parametrize(("adapter", "kind"), [("lora", "LORA"), ("span", "LORA"), ("tinylora", "TINYLORA")])
def test_the_adapter_is_named_as_peft_names_it(tmp_path, adapter, kind):
    config = peft_record(record_of(tmp_path, adapter=adapter))["run_info"]["peft_config"]
    assert (config["peft_type"], config["r"]) == (kind, 2)
    assert config.get("lora_alpha", 4.0) == 4.0


def test_runs_of_a_comparison_stay_apart(tmp_path):
    runs = [{}, {"seed": 1}, {"rate": 0.003}, {"name": "other"}]
    table = loaded([peft_record(record_of(tmp_path, **run)) for run in runs])
    assert len(table) == len(runs)


@pytest.mark.parametrize(("status", "theirs"), [("failed", "failed"), ("interrupted", "canceled")])
def test_a_run_without_figures_keeps_its_error(tmp_path, status, theirs):
    record = record_of(tmp_path, status=status, error="ValueError: no")
    for name in ("curve", "eval_reward_final", "trained_parameters", "adapter_bytes", "outcome", "total_seconds"):
        del record[name]
    found = peft_record(record)
    assert (found["train_info"]["status"], found["run_info"]["error_msg"]) == (theirs, "ValueError: no")
    assert loaded([found, peft_record(record_of(tmp_path))])["experiment_name"].size == 1


def test_finished_reports_are_written_and_nothing_else(tmp_path):
    records = [
        record_of(tmp_path),
        record_of(tmp_path, seed=1),
        record_of(tmp_path, seed=2, round="trial1"),
        record_of(tmp_path, seed=3, status="failed"),
    ]
    records.append(record_of(tmp_path, seed=4))
    records[-1]["recipe"]["part"] = None
    folder = tmp_path / "peft" / "results"
    assert write_peft_records(records, folder) == 2
    files = sorted(folder.iterdir())
    rows = [json.loads(file.read_text()) for file in files]
    assert [file.suffix for file in files] == [".json", ".json"]
    assert rows == [peft_record(record) for record in records[:2]]
    assert len(loaded(rows)) == 2
    assert write_peft_records(records, folder) == 2
    assert sorted(folder.iterdir()) == files


def test_accuracy_without_an_outcome_is_the_last_of_the_curve(tmp_path):
    found = peft_record(record_of(tmp_path, outcome=None))
    assert found["train_info"]["metrics"][-1]["test accuracy"] == 0.5
