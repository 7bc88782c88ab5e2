"""Trainers that take a fork adapter: reinforcement learning on TRL.

The names are looked up in their rooms on first use, so that importing the package does not import trl.
"""

from importlib import import_module
from typing import Any

_ROOMS = {
    "ForkGRPOConfig": "forklora.trainers.settings",
    "ForkGRPOTrainer": "forklora.trainers.rl",
}

__all__ = sorted(_ROOMS)


def __getattr__(name: str) -> Any:  # noqa: ANN401 - one function stands for every public name, of any type
    if name not in _ROOMS:
        raise AttributeError(f"module 'forklora.trainers' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(_ROOMS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOMS})
