"""DeepSpeed configurations: the name of a shipped one or a JSON file in, its settings out, or a readable refusal.

Decisions: a configuration that would put another optimizer in the place of an arm's own, or cast the adapter, is
refused before anything is loaded, because DeepSpeed does both without a word.

    python -c "from forklora.recipes.zero import deepspeed_path; print(deepspeed_path('zero2'))"
"""

import json
from pathlib import Path
from typing import Any

from forklora.recipes.reading import find_shipped
from forklora.recipes.refusal import Refusal

_SHIPPED = Path(__file__).parent / "deepspeed"


def deepspeed_paths() -> dict[str, Path]:
    """Name and path of every DeepSpeed configuration that comes with the package."""
    return {path.stem: path for path in sorted(_SHIPPED.glob("*.json"))}


def deepspeed_path(path_or_name: str | Path) -> Path:
    """The file meant: a path, or the name of a shipped one (``zero2``). Raises Refusal, naming the nearest one."""
    return find_shipped(path_or_name, deepspeed_paths(), what="DeepSpeed configuration", kind="JSON")


def deepspeed_settings(path_or_name: str | Path | None) -> dict[str, Any] | None:
    """What the configuration says; None stays None.

    Raises:
        Refusal: there is no such file, it holds no JSON object, or it would change what an arm trains, or with what.
    """
    if path_or_name is None:
        return None
    path = deepspeed_path(path_or_name)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refusal(f"the DeepSpeed configuration {path} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise Refusal(f"the DeepSpeed configuration {path} holds no keys; it is a JSON object such as {{...}}")
    if found := _takeovers(content):
        raise Refusal(f"the DeepSpeed configuration {path} cannot be used: {'; '.join(found)}")
    return content


def _takeovers(content: dict[str, Any]) -> list[str]:
    """Sections that would replace, without a word, what the recipe itself says."""
    found = [
        f"its section {section!r} would replace the {owner} of every arm without a word: take the section out"
        for section, owner in (("optimizer", "optimizer"), ("scheduler", "schedule"))
        if section in content
    ]
    offload = _part(_part(content, "zero_optimization"), "offload_optimizer").get("device", "none")
    if offload != "none" and content.get("zero_force_ds_cpu_optimizer", True):
        found.append(
            "with 'offload_optimizer' a CPU Adam would replace the optimizer of every arm without a word: set "
            "'zero_force_ds_cpu_optimizer' to false"
        )
    found += [
        f"'{precision}.enabled' would cast the adapter: take the section out; model.dtype is the base's precision"
        for precision in ("bf16", "fp16")
        if _part(content, precision).get("enabled") is True
    ]
    return found


def _part(content: dict[str, Any], name: str) -> dict[str, Any]:
    part = content.get(name)
    return part if isinstance(part, dict) else {}
