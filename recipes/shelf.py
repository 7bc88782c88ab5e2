"""A checkpoint's tensors, read one at a time when they are asked for.

Decisions: safetensors only, since other checkpoints cannot be read tensor by tensor; the files are found by their names
as transformers writes them, sharded or not; a quantized checkpoint is refused, its numbers are no weights.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forklora.recipes.demo import DEMO_NAME, demo_model_folder
from forklora.recipes.refusal import Refusal
from safetensors import SafetensorError, safe_open
from torch import Tensor

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class Shelf(Mapping[str, Tensor]):
    """The tensors of a checkpoint's safetensors files, read when they are asked for.

    Args:
        source: the demo model, a folder or a hub id.

    Raises:
        Refusal: there is no such model, it has no safetensors, or they are quantized or damaged.
    """

    def __init__(self, source: str) -> None:
        self.source, self.folder = source, checkpoint_folder(source)
        config = read_json(self.folder / "config.json") if (self.folder / "config.json").exists() else {}
        if config.get("quantization_config"):
            raise Refusal(f"{source} is quantized; load it, call its dequantize(), save it, and measure that")
        if (self.folder / _INDEX).exists():
            files = read_json(self.folder / _INDEX).get("weight_map", {})
        elif (self.folder / _SINGLE).exists():
            with opened_tensors(self.folder / _SINGLE) as file:
                files = dict.fromkeys(file.keys(), _SINGLE)
        else:
            raise Refusal(
                f"{source} has no {_SINGLE} and no index of shards; load it and save it again: "
                "AutoModelForCausalLM.from_pretrained(...).save_pretrained(FOLDER)"
            )
        if missing := sorted({name for name in files.values() if not (self.folder / name).exists()}):
            raise Refusal(f"{source} lacks {len(missing)} of its files, such as {missing[0]}")
        self._files = dict(files)

    def __getitem__(self, name: str) -> Tensor:
        with opened_tensors(self.folder / self._files[name]) as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def shape(self, name: str) -> list[int]:
        """Size of a tensor, without reading it."""
        with opened_tensors(self.folder / self._files[name]) as file:
            return list(file.get_slice(name).get_shape())

    def floats(self, name: str) -> bool:
        """Whether a tensor holds floating point numbers of a kind that can be compared."""
        with opened_tensors(self.folder / self._files[name]) as file:
            return file.get_slice(name).get_dtype() in ("F64", "F32", "F16", "BF16")


def opened_tensors(path: Path) -> Any:  # noqa: ANN401 - safetensors keeps the type private
    """A safetensors file, opened. Raises a Refusal where it cannot be read."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise Refusal(f"cannot read {path}: {error}; it is cut short, or no safetensors file") from error


def checkpoint_folder(source: str) -> Path:
    """The folder of a model or adapter: the demo model's, a local one, or that of a hub id, downloaded if need be."""
    if source == DEMO_NAME:
        return demo_model_folder()
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, allow_patterns=["*.safetensors", "*.json"]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise Refusal(f"{source!r} is no folder, and no hub model of that name can be had: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file's mapping. Raises a Refusal where it is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refusal(f"cannot read {path}: {error}") from error
    if not isinstance(found, dict):
        raise Refusal(f"{path} holds no mapping")
    return found
