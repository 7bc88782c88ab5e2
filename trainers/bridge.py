"""The only file that touches private parts of TRL, Accelerate and DeepSpeed; a contract test pins each.

What is private, and why it is needed:

- ``GRPOTrainer._generate_single_turn``: the one place where tokens are drawn; ours records the distribution meanwhile.
- ``GRPOTrainer._generate_and_score_completions``: its dictionary is shuffled and split row by row; what was recorded
  has to travel in it to stay with its rows.
- ``GRPOTrainer._prepare_inputs``, ``_buffered_inputs``: rows are shuffled before they are split; all parts belong to
  one update here, so ours are put back in groups, and a prompt is run in few parts.
- ``GRPOTrainer._compute_loss``: the loss itself, and the one place where a batch can be run in several passes.
- ``Accelerator.deepspeed_engine_wrapped``: a backward pass that is not the last of its batch must not end in a step.
- ``GRPOTrainer._metrics``, ``_step``, ``_tokenizer``: metrics reach the log, and tokens the sampler, only through them.
- ``trl.trainer.utils.create_model_from_path``: a model given by name must be there before the adapter, for its bases.
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from trl import GRPOTrainer
from trl.models.utils import unwrap_model_for_generation
from trl.trainer.utils import create_model_from_path

from forklora.trace import Trace


def load_policy(name: str, args: Any) -> nn.Module:  # noqa: ANN401
    """The model TRL would load for this name under these arguments."""
    settings = dict(args.model_init_kwargs or {})
    if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        settings["device_map"] = None
    settings.setdefault("trust_remote_code", args.trust_remote_code)
    return create_model_from_path(name, **settings)


def peak_memory() -> float:
    """Most memory held so far, MiB: of the accelerator where there is one, else resident memory of this process."""
    if torch.accelerator.is_available():
        return torch.accelerator.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


class PhaseClock:
    """Mixed into a GRPO trainer, logs where each step's time goes and the most memory held so far.

    ``seconds/sampling``, ``seconds/scoring`` (rewards, advantages, TRL's own forward passes without gradient) and
    ``seconds/update`` (forward and backward) add up over the micro-batches of a logged step; ``memory/peak_mib``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.phase_seconds: dict[str, float] = dict.fromkeys(("sampling", "scoring", "update"), 0.0)
        super().__init__(*args, **kwargs)

    @contextlib.contextmanager
    def _clock(self, phase: str) -> Iterator[None]:
        """Adds the seconds of the block to a phase, less those that went to other phases within it."""
        start, before = time.perf_counter(), sum(self.phase_seconds.values())
        yield
        inner = sum(self.phase_seconds.values()) - before
        self.phase_seconds[phase] += time.perf_counter() - start - inner

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - TRL's own pair
        with self._clock("sampling"):
            return super()._generate_single_turn(*args, **kwargs)

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        with self._clock("scoring"):
            return super()._generate_and_score_completions(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """As the trainer's, with the time of its forward and backward passes kept."""
        with self._clock("update"):
            return super().training_step(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As the trainer's, with the seconds of each phase and the peak memory joined to the line of a step."""
        if self.model.training and "loss" in logs:
            logs |= {f"seconds/{phase}": round(seconds, 4) for phase, seconds in self.phase_seconds.items()}
            logs["memory/peak_mib"] = round(peak_memory(), 1)
            self.phase_seconds = dict.fromkeys(self.phase_seconds, 0.0)
        super().log(logs, start_time)


class ClockedGRPOTrainer(PhaseClock, GRPOTrainer):
    """TRL's own trainer, unchanged but for the clock: the other side of a comparison."""


class SeamedGRPOTrainer(GRPOTrainer):
    """TRL's trainer with two seams: :meth:`draw` instead of its generation, :meth:`policy_loss` instead of its loss.

    A subclass that sets neither ``recording`` nor ``own_loss`` gets TRL's behavior unchanged. One with a loss of its
    own says in :meth:`passes` which rows to run together.
    """

    recording = False
    own_loss = False

    def draw(self, model: nn.Module, prompts: list[list[int]]) -> Trace:
        """Complete each prompt once; the rows of the trace are the prompts in their order."""
        raise NotImplementedError

    def passes(self, batch: dict[str, Any]) -> list[Tensor]:
        """Rows of one micro-batch that go through the model together; the passes run, and free, one after another."""
        raise NotImplementedError

    def policy_loss(self, model: nn.Module, batch: dict[str, Any], *, rows: Tensor) -> Tensor:
        """The share of these rows in the loss of one micro-batch, already divided for gradient accumulation."""
        raise NotImplementedError

    def finish_rollouts(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Add to, or change, the rows of a whole generation batch before they are shuffled and split."""
        return batch

    def metric(self, name: str, value: float) -> None:
        """Add a number to the averages of the next log line."""
        self._metrics["train" if self.model.training else "eval"][name].append(value)

    @property
    def accumulation(self) -> float:
        """Number of micro-batches a training step adds up; evaluation adds up none."""
        return float(self.current_gradient_accumulation_steps) if self.model.training else 1.0

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        if not self.recording:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        settings = {
            "gather_deepspeed3_params": self.args.ds3_gather_for_generation,
            "gradient_checkpointing_kwargs": self.args.gradient_checkpointing_kwargs,
        }
        with unwrap_model_for_generation(self.model_wrapped, self.accelerator, **settings) as unwrapped:
            self.trace = self.draw(unwrapped, prompt_ids)
        rows = zip(self.trace.completion_ids, self.trace.logprob, self.trace.completion_mask, strict=True)
        drawn = [(ids[mask].tolist(), logprob[mask].tolist()) for ids, logprob, mask in rows]
        return [ids for ids, _ in drawn], [logprob for _, logprob in drawn]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        return self.finish_rollouts(super()._generate_and_score_completions(inputs))

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:  # noqa: ANN401
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if not self.own_loss or self._buffered_inputs is before:
            return inputs
        self._buffered_inputs = regrouped(self._buffered_inputs)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        if not self.own_loss:
            return super()._compute_loss(model, inputs)
        *early, last = self._agreed(self.passes(inputs))
        done = torch.zeros((), device=self.accelerator.device)
        for rows in early:
            with self._unfinished(model):
                loss = self.policy_loss(model, inputs, rows=rows)
                self._backward(loss)
            done = done + loss.detach()
        return self.policy_loss(model, inputs, rows=last) + done

    def _agreed(self, passes: list[Tensor]) -> list[Tensor]:
        """As many passes on every rank, empty ones at the end: each backward pass may be a collective."""
        ranks = self.accelerator.num_processes
        counts = torch.tensor([len(passes)], device=self.accelerator.device)
        most = int(self.accelerator.gather(counts).max()) if ranks > 1 else len(passes)
        return passes + [passes[0][:0]] * (most - len(passes))

    @contextlib.contextmanager
    def _unfinished(self, model: nn.Module) -> Iterator[None]:
        """Gradients of this pass stay on their rank: the last pass of the batch exchanges the sum."""
        if self.is_deepspeed_enabled:
            yield
            return
        with self.accelerator.no_sync(model):
            yield

    def _backward(self, loss: Tensor) -> None:
        if not torch.is_grad_enabled():
            return
        # the loss is found under autocast, and a backward pass must not be
        with torch.autocast(self.accelerator.device.type, enabled=False):
            if self.is_deepspeed_enabled:
                self.accelerator.deepspeed_engine_wrapped.backward(loss, sync_gradients=False, scale_wrt_gas=False)
            else:
                self.accelerator.backward(loss)


def regrouped(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same rows in as many parts of the same sizes, those of one ``group`` next to each other."""
    order = torch.cat([part["group"] for part in parts]).argsort(stable=True)
    size = len(parts[0]["group"])
    chosen = [order[i * size : (i + 1) * size] for i in range(len(parts))]

    def rearranged(name: str) -> list[Any]:
        values = [part[name] for part in parts]
        if isinstance(values[0], list):
            flat = [row for value in values for row in value]
            return [[flat[i] for i in rows] for rows in chosen]
        if isinstance(values[0], Tensor) and values[0].ndim > 0:
            return [torch.cat(values)[rows] for rows in chosen]
        return values

    columns = {name: rearranged(name) for name in parts[0]}
    return [{name: values[i] for name, values in columns.items()} for i in range(len(parts))]


def accumulated_items(trainer: SeamedGRPOTrainer, batch: dict[str, Any]) -> Tensor:
    """Tokens of one accumulation window on one rank: what TRL divides by under ``dapo``."""
    items = torch.clamp(batch["num_items_in_batch"], min=1.0) / trainer.accelerator.num_processes
    if trainer.model.training:
        items = items * trainer.accumulation / trainer.args.steps_per_generation
    return items
