"""Lets a trainer's engine go, so that nothing of it reaches the next trainer of the process."""

from __future__ import annotations

import gc
from typing import Any

from transformers.integrations.deepspeed import unset_hf_deepspeed_config


def release(trainer: Any) -> None:  # noqa: ANN401 - any transformers Trainer
    """Destroy the trainer's DeepSpeed engine, if it has one; models are loaded whole again afterwards.

    The trainer and its model are not to be used any more.
    """
    if hasattr(trainer.model_wrapped, "destroy"):
        trainer.model_wrapped.destroy()
    trainer.accelerator.free_memory()
    unset_hf_deepspeed_config()
    gc.collect()
