"""Where a record comes from: versions, commit, hardware, hashes of weights."""

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forklora.gathering import whole
from forklora.rollouts import evaluating

_PACKAGES = ("forklora", "torch", "transformers", "peft", "trl", "accelerate", "deepspeed", "datasets")


def provenance() -> dict[str, Any]:
    """Versions of what computes, commit of this package and the machine, as a record holds them."""
    return {"versions": _versions(), **_commit(), "hardware": _hardware()}


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _commit() -> dict[str, Any]:
    """Commit and dirty flag of the checkout this file lies in; null where it is not in one."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}


def _hardware() -> dict[str, Any]:
    accelerators = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "accelerators": accelerators,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def hash_tensors(model: nn.Module) -> str:
    """SHA-256 of a model's own parameters and buffers, adapters left out, in the order they stand in it.

    Weights partitioned by ZeRO-3 are gathered one after the other: every rank has to call this.
    """
    digest = hashlib.sha256()
    named = [*model.named_parameters(), *model.named_buffers()]
    for _, tensor in ((n, t) for n, t in named if "lora_" not in n):
        with whole(tensor):
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def hash_logits(model: nn.Module, ids: list[int]) -> str:
    """SHA-256 of the logits on one prompt: equal for all arms that start as the same function."""
    device = next(model.parameters()).device
    with evaluating(model):
        logits = model(input_ids=torch.tensor([ids], device=device)).logits
    return hashlib.sha256(logits.float().cpu().numpy().tobytes()).hexdigest()
