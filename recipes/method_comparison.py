"""Puts a record into the schema of PEFT's method_comparison, whose tables and plots then read it.

Decisions: nothing is estimated that was not measured. Their loader takes null for the loss; where it needs a whole
number 0 stands for what is not known, and `forklora.not_measured` says for which.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from forklora.recipes.files import write_json

_STATUS = {"done": "success", "failed": "failed", "interrupted": "canceled"}
_PACKAGES = ("transformers", "peft", "datasets", "bitsandbytes", "torch")


def write_peft_records(records: Iterable[dict[str, Any]], folder: Path) -> int:
    """Write one file for each finished run of a `report` round, whole or not at all; returns how many.

    Args:
        records: of a comparison, those of other rounds and unfinished ones among them.
        folder: it is made where it does not exist; files of earlier runs in it are replaced.
    """
    written = 0
    for record in records:
        part = record["recipe"]["part"]
        if record["status"] == "done" and part is not None and part["round"] == "report":
            found = peft_record(record)
            write_json(folder / f"{found['run_info']['experiment_name'].replace('/', '--')}.json", found)
            written += 1
    return written


def peft_record(record: dict[str, Any]) -> dict[str, Any]:
    """A record in the schema of PEFT's method_comparison.

    What does not mean the same there:

    * the three figures of accelerator memory are all the peak of the run, and without an accelerator that of its whole
      process; its average and 99th percentile are not kept.
    * train samples are rollouts, those that bases were read from among them; train time counts initialization.
    * the file size of a model whose own weights were trained is that of these weights at the model's precision.
    * `forklora` is not in their schema: it holds what a policy has become, and the names of what was not measured.
    """
    recipe, arm = record["recipe"], record["recipe"]["arms"][0]
    hardware = record.get("hardware") or {}
    return {
        "run_info": {
            "created_at": record.get("created_at"),
            "total_time": record.get("total_seconds"),
            "experiment_name": _experiment(record),
            "peft_branch": None,
            "train_config": _train_config(recipe, arm),
            "peft_config": _peft_config(arm),
            "error_msg": record.get("error") or "",
        },
        "train_info": _train_info(record),
        "meta_info": {
            "model_info": {"sha": None, "created_at": None},
            "dataset_info": {recipe["task"]["name"]: {"sha": None, "created_at": None}},
            "package_info": _packages(record.get("versions") or {}),
            "system_info": {
                "system": None,
                "release": None,
                "version": None,
                "machine": hardware.get("machine"),
                "processor": hardware.get("processor"),
                "accelerator": ", ".join(hardware.get("accelerators") or ()) or None,
            },
            "pytorch_info": None,
        },
        "forklora": {"outcome": record.get("outcome"), "not_measured": _missing(record)},
    }


def _experiment(record: dict[str, Any]) -> str:
    """A name that no other run of a comparison has."""
    recipe, arm = record["recipe"], record["recipe"]["arms"][0]
    place = recipe["part"] or {"grid": recipe["name"], "task": recipe["task"]["name"]}
    return f"{place['grid']}/{place['task']}/{arm['name']}-rate{arm['rate']:g}-seed{recipe['seed']}"


def _train_config(recipe: dict[str, Any], arm: dict[str, Any]) -> dict[str, Any]:
    sampling, evaluation = recipe["sampling"], recipe["evaluation"]
    kept = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p")
    return {
        "model_id": recipe["model"]["name"],
        "dtype": recipe["model"]["dtype"],
        "batch_size": recipe["prompts"] * recipe["group"],
        "batch_size_eval": evaluation["prompts"] * evaluation["samples"],
        "max_steps": recipe["steps"],
        "eval_steps": evaluation["every"],
        "seed": recipe["seed"],
        "optimizer_type": arm["optimizer"],
        "optimizer_kwargs": {"lr": arm["rate"]},
        "lr_scheduler": None if arm["schedule"] == "constant" else arm["schedule"],
        "generation_kwargs": {name: sampling[name] for name in kept},
    }


def _peft_config(arm: dict[str, Any]) -> dict[str, Any] | None:
    """What PEFT was given, as far as the arm says it; None for weights that are the model's own."""
    if arm["adapter"] == "full":
        return None
    alpha = arm["rank"] if arm["alpha"] is None else arm["alpha"]
    tiny = arm["adapter"] == "tinylora"
    return {
        "peft_type": "TINYLORA" if tiny else "LORA",
        "r": arm["rank"],
        **({"u": arm["width"]} if tiny else {"lora_alpha": alpha}),
        "target_modules": arm["targets"],
        "arm": arm,
    }


def _train_info(record: dict[str, Any]) -> dict[str, Any]:
    curve = record.get("curve") or []
    memory = record.get("peak_memory_bytes") or 0
    outcome = record.get("outcome") or {}
    last = {
        "step": curve[-1]["step"],
        "test accuracy": outcome.get("accuracy", record["eval_reward_final"]),
        "train loss": None,
        "train samples": curve[-1]["rollouts"],
        "train total tokens": 0,
    } if curve else None  # fmt: skip
    return {
        "status": _STATUS[record["status"]],
        "train_time": curve[-1]["seconds"] if curve else None,
        "accelerator_memory_reserved_avg": memory,
        "accelerator_memory_max": memory,
        "accelerator_memory_reserved_99th": memory,
        "file_size": _file_size(record),
        "num_trainable_params": record.get("trained_parameters"),
        "num_total_params": None,
        "metrics": [last] if last else [],
    }


def _file_size(record: dict[str, Any]) -> int:
    size, trained = record.get("adapter_bytes"), record.get("trained_parameters")
    own = record["recipe"]["arms"][0]["adapter"] == "full"
    if size is None and own and trained is not None:
        return trained * getattr(torch, record["recipe"]["model"]["dtype"]).itemsize
    return size or 0


def _missing(record: dict[str, Any]) -> list[str]:
    """Fields that are null or 0 because nothing was measured."""
    zeros = {"accelerator_memory": record.get("peak_memory_bytes"), "file_size": _file_size(record) or None}
    return ["train loss", "train total tokens", *(name for name, value in zeros.items() if value is None)]


def _packages(versions: dict[str, str | None]) -> dict[str, str | None]:
    found: dict[str, str | None] = {f"{name}-version": versions.get(name) for name in _PACKAGES}
    return found | {f"{name}-commit-hash": None for name in _PACKAGES}
