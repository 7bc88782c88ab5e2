"""The weights of a base with a PEFT adapter merged into it, found layer by layer when they are asked for.

Decisions: the base is built with weights that take no memory (one zero, seen as a matrix of any size); a layer gets its
own in float64 (a very large one in float32) and PEFT merges its adapter into them, so that no rounding hides a small
update; adapters whose loading changes the base are refused, since their file alone does not say what became of it.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from forklora.recipes.refusal import Refusal
from forklora.recipes.shelf import Shelf, opened_tensors
from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn

_MOVES_BASE = ("pissa", "olora", "lora_ga", "corda", "loftq")
_WIDE = 2**26  # numbers of a weight up to which it is merged in float64


class MergedWeights(Mapping[str, Tensor]):
    """The weights that an adapter changes, as they are with it.

    Args:
        base: the weights without it.
        folder: of the adapter.

    Raises:
        Refusal: the adapter cannot be read, is of another base, changes no weights, or cannot be merged.
    """

    def __init__(self, base: Shelf, folder: Path) -> None:
        self._base = base
        self._layers = _changed(_with_adapter(base, folder), base, folder)

    def __getitem__(self, name: str) -> Tensor:
        module, parameter = self._layers[name]
        if isinstance(module, ModulesToSaveWrapper):
            return getattr(module.modules_to_save[module.active_adapters[0]], parameter).detach()
        return self._merged(module, name, parameter=parameter)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def _merged(self, module: Any, name: str, *, parameter: str) -> Tensor:  # noqa: ANN401 - any PEFT layer
        inner = module.get_base_layer()
        kept = dict(inner.named_parameters(recurse=False))
        stem = name.removesuffix(parameter)
        for n, p in kept.items():
            value = self._base[stem + n] if _hollow(p) else p.detach()
            wide = torch.float64 if value.numel() <= _WIDE else torch.float32
            setattr(inner, n, nn.Parameter(value.to(wide), requires_grad=False))
        try:
            module.merge(safe_merge=True)
            return getattr(inner, parameter).detach()
        except (ValueError, NotImplementedError, RuntimeError) as error:
            raise Refusal(f"PEFT cannot merge the adapter of {name}: {error}") from error
        finally:
            module.merged_adapters.clear()
            for n, p in kept.items():
                setattr(inner, n, p)


def _with_adapter(base: Shelf, folder: Path) -> PeftModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError) as error:
        raise Refusal(f"cannot read the adapter {folder}: {error}") from error
    if config.is_prompt_learning:
        raise Refusal(f"the adapter {folder} learns prompts ({config.peft_type}): it changes no weight")
    start = getattr(config, "init_lora_weights", None)
    if isinstance(start, str) and start.startswith(_MOVES_BASE):
        raise Refusal(
            f"the adapter {folder} was started by {start!r}, which changes the base when it is loaded; save it with "
            "path_initial_model_for_weight_conversion=..., which makes an ordinary LoRA of it"
        )
    try:
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base.folder))
        _hollow_out(skeleton, real=_saved_along(folder))
        with torch.random.fork_rng():  # what an adapter draws before it is loaded
            return PeftModel.from_pretrained(skeleton, str(folder))
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise Refusal(f"the adapter {folder} does not fit {base.source}: {error}") from error


def _saved_along(folder: Path) -> set[str]:
    """Weights of the base that stand in the adapter's own file: PEFT saves embeddings so."""
    file = folder / "adapter_model.safetensors"
    if not file.exists():
        return set()
    with opened_tensors(file) as tensors:
        names = [name.removeprefix("base_model.model.") for name in tensors.keys()]  # noqa: SIM118 - no mapping
    return {name.replace(".base_layer.", ".") for name in names if ".base_layer." in name}


def _hollow_out(model: nn.Module, *, real: set[str]) -> None:
    """Give every tensor of a model on the meta device numbers without memory, those named real ones; tied stay tied."""
    made: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        for n, p in list(module.named_parameters(recurse=False)):
            zeros = torch.zeros(p.shape) if f"{name}.{n}" in real else torch.zeros(()).expand(p.shape)
            setattr(module, n, made.setdefault(id(p), nn.Parameter(zeros, requires_grad=False)))
        for n, b in list(module.named_buffers(recurse=False)):
            setattr(module, n, torch.zeros((), dtype=b.dtype).expand(b.shape))


def _hollow(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size()


def _changed(model: PeftModel, base: Shelf, folder: Path) -> dict[str, tuple[Any, str]]:
    """Every weight of the base that the adapter changes, with the module that changes it."""
    found: dict[str, tuple[Any, str]] = {}
    biased = any(getattr(config, "lora_bias", False) for config in model.peft_config.values())
    for name, module in model.get_base_model().named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            owned = [n for n, _ in module.original_module.named_parameters(recurse=False)]
        elif isinstance(module, BaseTunerLayer) and hasattr(module, "merge"):
            owned = ["weight", *(["bias"] if biased else [])]
        else:
            continue
        found |= {f"{name}.{parameter}": (module, parameter) for parameter in owned}
    if missing := sorted(set(found) - set(base)):
        raise Refusal(
            f"{len(missing)} weights that the adapter {folder} changes are not in {base.source}, such as {missing[0]}"
        )
    if not found:
        raise Refusal(f"the adapter {folder} changes no weight of {base.source}")
    return found
