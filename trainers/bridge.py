"""The only file that touches private parts of TRL, Accelerate and DeepSpeed; a contract test pins each.

What is private, and why it is needed:

- ``GRPOTrainer._generate_single_turn``: the one place where tokens are drawn; ours records the distribution meanwhile.
- ``GRPOTrainer._generate_and_score_completions``: its dictionary is shuffled and split row by row; what was recorded
  has to travel in it to stay with its rows.
- ``GRPOTrainer._prepare_inputs``, ``_buffered_inputs``: rows are shuffled before they are split; all parts belong to
  one update here, so ours are put back in groups, and a prompt is run in few parts.
- ``GRPOTrainer._compute_loss``: the loss itself, and the one place where a batch can be run in several passes.
- ``Accelerator.deepspeed_engine_wrapped``: a backward pass that is not the last of its batch must not end in a step.
- ``Trainer._save_checkpoint``, ``_get_output_dir``: a checkpoint is sealed when all of it is written, and only then may
  an older one be deleted. ``Trainer._load_from_checkpoint``: PEFT reads ``U C`` as a product, which is not to the bit.
- ``Trainer._save``: under ZeRO-3 transformers leaves out frozen parameters, and with them the frozen bases.
- ``GRPOTrainer._metrics``, ``_step``, ``_tokenizer``: metrics reach the log, and tokens the sampler, only through them.
- ``trl.trainer.utils.create_model_from_path``: a model given by name must be there before the adapter, for its bases.
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from forklora.trainers.checkpoints import break_seal, checked, latest_whole, seal
from forklora.trainers.engine import before_step
from peft import PeftModel
from torch import Tensor, nn
from transformers.trainer_utils import rotate_checkpoints
from trl import GRPOTrainer
from trl.models.utils import unwrap_model_for_generation
from trl.trainer.utils import create_model_from_path

from forklora.gathering import whole
from forklora.passes import regrouped
from forklora.trace import Trace


def load_policy(name: str, args: Any) -> nn.Module:  # noqa: ANN401
    """The model TRL would load for this name under these arguments."""
    if args.deepspeed_plugin is not None:
        from deepspeed import init_distributed

        init_distributed(verbose=False)  # zero.Init would otherwise believe that it is alone
    settings = dict(args.model_init_kwargs or {})
    precision = contextlib.nullcontext() if args.deepspeed_plugin is None else _made_in(settings.get("dtype"), args)
    if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        settings["device_map"] = None
    settings.setdefault("trust_remote_code", args.trust_remote_code)
    with precision:
        return create_model_from_path(name, **settings)


@contextlib.contextmanager
def _made_in(dtype: str | torch.dtype | None, args: Any) -> Iterator[None]:  # noqa: ANN401
    """Weights made within the block in ``zero.Init``'s pieces have this precision: by itself it takes the engine's."""
    section = {"bfloat16": "bf16", "float16": "fp16"}.get(str(dtype).removeprefix("torch."))
    given = args.deepspeed_plugin.deepspeed_config
    if section is None:
        yield
        return
    before = dict(given)
    given[section] = {"enabled": True}
    try:
        yield
    finally:
        given.clear()
        given.update(before)


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


class CheckpointedGRPOTrainer(GRPOTrainer):
    """TRL's trainer whose checkpoints are whole or not taken for one, with adapters that ZeRO-3 has partitioned.

    A subclass keeps more of its own in them through :meth:`write_extras` and :meth:`read_extras`.
    """

    before_step: Callable[[], None] | None = None

    def write_extras(self, folder: Path) -> None:
        """Called on every rank when a checkpoint is written, before it is sealed."""

    def read_extras(self, folder: Path) -> None:
        """Called on every rank when training resumes from a whole checkpoint."""

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:  # noqa: ANN401
        """As the trainer's; ``True`` resumes from the latest whole checkpoint, one that is cut short is refused."""
        chosen: str | Path | None = None
        if resume_from_checkpoint is True:
            chosen = latest_whole(self.args.output_dir)
            if chosen is None:
                raise ValueError(f"{self.args.output_dir} holds no whole checkpoint to resume from.")
        elif resume_from_checkpoint:
            chosen = checked(resume_from_checkpoint)
        if chosen is not None:
            self.read_extras(Path(chosen))
        return super().train(None if chosen is None else str(chosen), **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """As the trainer's; under DeepSpeed ``before_step`` is called between the last backward pass and the step."""
        if self.is_deepspeed_enabled and self.before_step is not None:
            before_step(self.deepspeed, self.before_step)
        return super().training_step(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the trainer's; of a partitioned adapter all tensors are gathered and written, frozen ones too."""
        adapted = self.is_deepspeed_enabled and isinstance(self.model, PeftModel)
        prefix = self.model.base_model.prefix if adapted else ""
        mine = [p for name, p in self.model.named_parameters() if prefix in name] if adapted else []
        if not any(hasattr(p, "ds_id") for p in mine):
            super().save_model(output_dir, _internal_call)
            return
        with whole(*mine):
            state = {n: t.detach().cpu().clone() for n, t in self.model.state_dict().items() if prefix in n}
        empty = [name for name, tensor in state.items() if tensor.numel() == 0]
        if empty:
            raise RuntimeError(f"{len(empty)} adapter tensors are empty ({empty[0]}): nothing was written.")
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:  # noqa: ANN401
        output = Path(self._get_output_dir(trial=trial))
        folder = output / f"checkpoint-{self.state.global_step}"
        limit, self.args.save_total_limit = self.args.save_total_limit, None  # nothing goes before this one is whole
        if self.args.should_save:
            break_seal(folder)
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        self.write_extras(folder)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            seal(folder)
            best = self.state.best_model_checkpoint
            rotate_checkpoints(str(output), save_total_limit=limit, best_model_checkpoint=best, use_mtime=True)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.read_extras(Path(resume_from_checkpoint))


class ClockedGRPOTrainer(PhaseClock, GRPOTrainer):
    """TRL's own trainer, unchanged but for the clock: the other side of a comparison."""


class SeamedGRPOTrainer(CheckpointedGRPOTrainer):
    """TRL's trainer with two seams: :meth:`draw` instead of its generation, :meth:`policy_loss` instead of its loss.

    A subclass that sets neither ``recording`` nor ``own_loss`` gets TRL's behavior unchanged. One with a loss of its
    own says in :meth:`passes` which rows to run together.
    """

    recording = False
    own_loss = False
    trace: Trace | None = None
    window: list[dict[str, Any]] = []  # micro-batches whose gradients are added up, the latest last

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
        self.window = [*self.window, inputs][-int(self.accumulation) :]
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
