"""ForkLoRA: low-rank adapters whose frozen bases are read off the places where a model could have gone another way.

Every public name lives in a room (a module) and is looked up there on first use, so that `import forklora` costs
nothing: a reader of traces never waits for peft, and a server that only loads an adapter never waits for trl.

    from forklora import ForkLoraConfig, collect_bases, add_fork_lora
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forklora.adapter import ForkLoraConfig as ForkLoraConfig
    from forklora.adapter import add_fork_lora as add_fork_lora
    from forklora.attachment import attach as attach
    from forklora.bases import Bases as Bases
    from forklora.bases import collect_bases as collect_bases
    from forklora.export import save_plain_lora as save_plain_lora
    from forklora.optim import ProjectedSGD as ProjectedSGD
    from forklora.optim import StepLengthSGD as StepLengthSGD
    from forklora.trace import Trace as Trace

__version__ = "0.1.0"

_ROOMS = {
    "Bases": "forklora.bases",
    "ForkGRPOConfig": "forklora.trainers",
    "ForkGRPOTrainer": "forklora.trainers",
    "ForkLoraConfig": "forklora.adapter",
    "ProjectedSGD": "forklora.optim",
    "Trace": "forklora.trace",
    "StepLengthSGD": "forklora.optim",
    "add_fork_lora": "forklora.adapter",
    "attach": "forklora.attachment",
    "collect_bases": "forklora.bases",
    "save_plain_lora": "forklora.export",
}

__all__ = sorted(_ROOMS)


def __getattr__(name: str) -> Any:  # noqa: ANN401 - one function stands for every public name, of any type
    if name not in _ROOMS:
        raise AttributeError(f"module 'forklora' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(_ROOMS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOMS})
