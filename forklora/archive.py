"""Writes named tensors with their facts as one checked safetensors file, and reads them back.

Decisions: a file appears under its name only when it is complete; it holds a checksum of all its content, because a
flipped bit in a basis or a probability would otherwise train on without a word.
"""

from __future__ import annotations

import json
import os
import uuid
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor


def save_tensors(path: str | Path, tensors: Mapping[str, Tensor], *, kind: str, facts: Mapping[str, str]) -> None:
    """Write tensors and facts as one safetensors file with a checksum, under a temporary name first.

    Args:
        path: where the file ends up; missing folders are made.
        tensors: name to tensor, on any device.
        kind: what the file is, asked for again by :func:`load_tensors`.
        facts: strings stored beside the tensors.

    Raises:
        OSError: the file cannot be written; nothing is left behind.
    """
    from safetensors.torch import save

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # safetensors refuses tensors that share memory, and a field may well be a view of another one.
    own = {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}
    metadata = {"kind": kind, "facts": json.dumps(dict(facts), sort_keys=True)}
    content = save(own, metadata | {"checksum": _checksum(own, metadata)})
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load_tensors(path: str | Path, *, kind: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and facts of a file that :func:`save_tensors` wrote, on the CPU.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is cut short or damaged, or holds something else than ``kind``.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise ValueError(f"{path} is cut short, damaged or no safetensors file ({error}); write it anew.") from error
    if metadata.get("kind") != kind:
        raise ValueError(f"{path} holds {metadata.get('kind', 'something unnamed')!r}, not {kind!r}.")
    if metadata.pop("checksum", None) != _checksum(tensors, metadata):
        raise ValueError(f"{path} is damaged: its content does not match its checksum; write it anew.")
    return tensors, json.loads(metadata["facts"])


def _checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    value = zlib.crc32(json.dumps(dict(metadata), sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        value = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), value)
        value = zlib.crc32(tensor.flatten().view(torch.uint8).numpy().data, value)
    return f"{value:08x}"
