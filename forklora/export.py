"""Turns the adapter into an ordinary LoRA that stock PEFT and vLLM load."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor

from forklora.collective import from_first
from forklora.gathering import partitioned, whole


def plain_lora(peft_model: PeftModel, adapter_name: str = "default") -> tuple[dict[str, object], dict[str, Tensor]]:
    """The adapter as LoRA: the contents of ``adapter_config.json`` and tensors named as PEFT names them.

    Every kind is ``dW = s B A`` of its own rank: ``B = U C`` or ``B = U Gamma`` is multiplied out once, in float32.
    Where ZeRO-3 has the adapter in pieces every rank must call this, and all get the whole.

    Raises:
        ValueError: no such adapter, or a tensor that is empty (a ZeRO-3 partition) or not finite.
    """
    if adapter_name not in peft_model.peft_config:
        raise ValueError(f"no adapter {adapter_name!r}; there are {', '.join(peft_model.peft_config)}.")
    config = peft_model.peft_config[adapter_name].to_dict()
    config["inference_mode"] = True
    with whole(*_parameters(peft_model, adapter_name)):
        state = get_peft_model_state_dict(peft_model, adapter_name=adapter_name, save_embedding_layers=False)
        tensors = {name: value.detach().cpu().clone().contiguous() for name, value in state.items()}
    bad = [name for name, value in tensors.items() if value.numel() == 0 or not torch.isfinite(value).all()]
    if bad or not tensors:
        raise ValueError(
            f"{len(bad)} of {len(tensors)} adapter tensors are empty or not finite ({', '.join(bad[:2])}): they were "
            "lost in training, or cut up by something else than DeepSpeed ZeRO-3; nothing was written."
        )
    return {k: sorted(v) if isinstance(v, set) else v for k, v in config.items()}, tensors


def save_plain_lora(peft_model: PeftModel, folder: str | Path, *, adapter_name: str = "default") -> Path:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors``, which need nothing of this package to load.

    Both files are written beside the folder first and moved into place, so an interrupted write leaves the old ones.
    Where ZeRO-3 has the adapter in pieces every rank must call this, and rank 0 writes.

    Returns:
        The folder, on every rank once it is written.
    """
    together = any(map(partitioned, _parameters(peft_model, adapter_name)))
    config, tensors = plain_lora(peft_model, adapter_name)
    if together:
        return from_first(lambda: _write(config, tensors, Path(folder)))
    return _write(config, tensors, Path(folder))


def _parameters(peft_model: PeftModel, adapter_name: str) -> list[Tensor]:
    return [p for n, p in peft_model.named_parameters() if ".lora_" in n and f".{adapter_name}." in f"{n}."]


def _write(config: dict[str, object], tensors: dict[str, Tensor], folder: Path) -> Path:
    from safetensors.torch import save_file

    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    partial.mkdir()
    try:
        save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        (partial / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True, default=str) + "\n")
        folder.mkdir(exist_ok=True)
        for file in partial.iterdir():
            os.replace(file, folder / file.name)
    finally:
        shutil.rmtree(partial)
    return folder
