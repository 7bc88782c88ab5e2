"""Names the adapters of a comparison, with their optimizers, as its tables show them."""

from collections.abc import Iterator, Mapping
from typing import Any

_STARTS = {
    "default": "LoRA",
    "gaussian": "LoRA, Gaussian start",
    "pissa": "PiSSA",
    "olora": "OLoRA",
    "orthogonal": "LoRA, orthogonal start",
    "mica": "MiCA",
    "eva": "EVA",
    "lora_ga": "LoRA-GA",
}
_DIRECTIONS = {
    "random": "random directions",
    "singular": "largest singular vectors",
    "minor": "smallest singular vectors",
}
_SIGNALS = {"shuffled": "forks with shuffled tokens", "confident": "confident positions"}
_OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD", "length": "SGD, step length", "kl": "SGD, step of root 2 KL"}


def adapter_label(arm: Mapping[str, Any]) -> str:
    """Kind, size, directions of an arm's adapter and what is unusual of its training; the arm is as in grid.json."""
    return ", ".join([_kind(arm) + _directions(arm), *_remarks(arm)])


def optimizer_label(arm: Mapping[str, Any], rate: float | None) -> str:
    """Optimizer with its rate, such as `AdamW 0.003`; without one where there is none."""
    name = str(arm.get("optimizer"))
    known = _OPTIMIZERS.get(name, name)
    return known if rate is None else f"{known} {rate:g}"


def _kind(arm: Mapping[str, Any]) -> str:
    adapter, rank, width = str(arm.get("adapter")), arm.get("rank") or 1, arm.get("width")
    if adapter == "full":
        return "all weights"
    if adapter == "lora":
        return f"{_STARTS.get(str(arm.get('init') or 'default'), str(arm.get('init')))}, rank {rank}"
    if adapter == "tinylora":
        return "TinyLoRA" if width is None else f"TinyLoRA, {width} per layer"
    if adapter == "block":
        return f"`block` {width or rank} x {rank}"
    return f"`{adapter}`, rank {rank}" + ("" if width is None else f", width {width}")


def _directions(arm: Mapping[str, Any]) -> str:
    basis, forks = str(arm.get("basis") or "forks"), arm.get("forks") or {}
    if basis != "forks":
        return f" on {_DIRECTIONS.get(basis, basis)}"
    signal = str(forks.get("signal") or "forks")
    found = [_SIGNALS[signal]] if signal in _SIGNALS else []
    task = (forks.get("task") or {}).get("name")
    found += [f"forks of {task}"] if task else []
    found += [f"forks of seed {forks['seed']}"] if forks.get("seed") else []
    return f" on {', '.join(found)}" if found else ""


def _remarks(arm: Mapping[str, Any]) -> Iterator[str]:
    if arm.get("layers") is not None:
        yield f"{arm['layers']} layers"
    if arm.get("tying"):
        yield f"tying {arm['tying']:g}"
    if arm.get("train_basis"):
        yield "basis trained"
    if isinstance(arm.get("targets"), list):
        yield f"on {', '.join(arm['targets'])}"
    if arm.get("base_prompts") is not None:
        yield f"offline on {arm['base_prompts']} prompts"
    if arm.get("brake") is not None:
        yield f"brake {arm['brake']:g}"
    if arm.get("centering") in ("value", "none"):
        yield f"centering {arm['centering']}"
    if arm.get("reward") == "random":
        yield "random reward"
