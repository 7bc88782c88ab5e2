"""``ForkGRPOTrainer``: TRL's GRPO with bases from its own rollouts, the recorded sampler and the centered loss.

Decisions: bases are collected before TRL builds anything, so optimizer and DeepSpeed see the final parameters; each
prompt runs once for its group; training uses the recorded backward signal and never touches the vocabulary; rows that
carry nothing are skipped but counted; options that contradict the loss are refused by name.

    trainer = ForkGRPOTrainer(model, reward_funcs=reward, args=ForkGRPOConfig("out"), train_dataset=prompts,
                              peft_config=ForkLoraConfig(kind="span", r=1))
    trainer.train()
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from forklora.trainers.bridge import PhaseClock, SeamedGRPOTrainer, load_policy
from forklora.trainers.settings import ForkGRPOConfig, refuse_narrow
from forklora.trainers.stepping import FIRST_LOOK, stated_steps
from peft import get_peft_model
from torch import Tensor, nn

from forklora.adapter import ForkLoraConfig
from forklora.archive import load_tensors, save_tensors
from forklora.attachment import needed
from forklora.bases import Bases, BasisConfig, collect_bases, encode
from forklora.divergence import divergences
from forklora.drawing import shared_numbers
from forklora.forks import find_forks
from forklora.forward import Calls, completion_hidden
from forklora.losses import per_batch, prefix_value, signal_loss
from forklora.passes import joined, same_prompt, split_rows
from forklora.rollouts import Luck, Sampler, sample, stop_at
from forklora.slots import folded, make_room
from forklora.state import adapter_tensors, put_adapter_tensors
from forklora.trace import Trace
from forklora.unembed import evaluation_mode, read_unembedding, unwrap

_CPU_PASS, _ACCELERATOR_PASS = 1024, 16_384  # tokens
_BASES, _STATE, _STATE_KIND = "bases.safetensors", "adapter_state.safetensors", "adapter state"
_FOREIGN = ("tools", "rollout_func", "environment_factory")  # bring tokens that our sampler did not draw


class ForkGRPOTrainer(PhaseClock, SeamedGRPOTrainer):
    """GRPO on the forks: as ``trl.GRPOTrainer``, to be given a ``ForkLoraConfig`` (or any other adapter, or none).

    Args are TRL's. ``bases`` holds what was collected, and is written to ``output_dir/bases.safetensors``; ``trace``
    is the latest recorded batch of rollouts.
    """

    def __init__(
        self,
        model: "str | nn.Module",
        reward_funcs: Any = None,  # noqa: ANN401
        args: ForkGRPOConfig | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        if args is None:
            args = ForkGRPOConfig("fork-grpo")
        if not isinstance(args, ForkGRPOConfig):
            raise TypeError(f"args is a {type(args).__name__}; ForkGRPOTrainer takes a ForkGRPOConfig.")
        self.own_loss = args.score_centering == "sampler"
        self.recording = self.own_loss or _only_stops(args, kwargs)
        _refuse_parts(args, kwargs)
        if isinstance(model, str):
            model = load_policy(model, args)
        peft_config, self.bases = kwargs.get("peft_config"), None
        if isinstance(peft_config, ForkLoraConfig):
            if peft_config.bases is None:
                self.bases = self._collect(model, args, kwargs)
                peft_config = replace(peft_config, bases=self.bases)
            kwargs = {**kwargs, "peft_config": peft_config}
        if peft_config is not None and args.zero_stage == 3 and args.beta == 0.0:
            # TRL would make the adapter in the base's own precision there, and small steps would be lost
            set_seed(args.seed)
            model, kwargs = get_peft_model(model, peft_config), {**kwargs, "peft_config": None}
        super().__init__(model, reward_funcs, args, **kwargs)
        if args.deepspeed and not self.is_deepspeed_enabled:
            raise ValueError(
                "deepspeed= is set, but the launcher left DeepSpeed out (accelerate launch --cpu does): start with "
                "`deepspeed` or `accelerate launch --use_deepspeed`."
            )
        if self.own_loss and self.aux_loss_enabled:
            raise ValueError("score_centering='sampler' has no router loss: set router_aux_loss_coef=0.0.")
        self._head = read_unembedding(self.model, self._tokenizer) if self.recording or args.step_kl else None
        self._sampler = _sampler(self.args, self._tokenizer, self.eos_token_ids) if self.recording else None
        self.looked = FIRST_LOOK
        self._drawn: tuple[tuple[str, int], int] = (("", 0), 0)  # batches drawn so far, in which mode at which step

    @staticmethod
    def _collect(model: nn.Module, args: ForkGRPOConfig, kwargs: dict[str, Any]) -> Bases:
        tokenizer, data = kwargs.get("processing_class"), kwargs.get("train_dataset")
        if tokenizer is None:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(model.config._name_or_path, padding_side="left")
        if data is None:
            raise ValueError("a ForkLoraConfig without bases needs a train_dataset with prompts to roll out.")
        prompts = [row["prompt"] for row in islice(_shuffled(data, args.basis_seed), args.basis_prompts)]
        rank, ranks = args.process_index, args.world_size
        config = BasisConfig(group=args.num_generations, seed=args.basis_seed, progress=not args.disable_tqdm)
        config = needed(model, kwargs["peft_config"], collect=config)
        ids = [encode(tokenizer, prompt, **(args.chat_template_kwargs or {})) for prompt in prompts[rank::ranks]]
        sampler = _sampler(args, tokenizer, _eos_ids(model, tokenizer))
        bases = collect_bases(model.to(args.device), tokenizer, ids, config=config, sampler=sampler)
        if args.process_index == 0:
            bases.save(Path(args.output_dir) / _BASES)
        return bases

    def draw(self, model: nn.Module, prompts: list[list[int]]) -> Trace:
        """Complete each prompt once, recording the distribution it was drawn from."""
        luck, head = self._luck(len(prompts)), self._head
        # below every wrapper: under ZeRO-3 each call of one is an exchange, and ranks decode unequally often
        base = unwrap(model)
        trace = sample(base, prompts, sampler=self._sampler, unembedding=head, record=self.own_loss, luck=luck)
        mask = trace.completion_mask
        self.metric("forks/share", len(find_forks(trace)) / max(int(mask.sum()), 1))
        if trace.spread is not None:
            self.metric("forks/spread", float(trace.spread[mask].mean()))
        self.metric("forks/leak", float(trace.leak[mask].mean()))
        return trace

    def _luck(self, rows: int) -> Luck:
        """Numbers that depend on seed, step and the row's place in the global batch, not on ranks or on resuming."""
        at = ("train" if self.model.training else "eval", self.state.global_step)
        self._drawn = (at, self._drawn[1] + 1 if self._drawn[0] == at else 0)
        first, ranks = rows * self.accelerator.process_index, self.accelerator.num_processes
        key = f"{self.args.seed}/{at[0]}/{at[1]}/{self._drawn[1]}"
        return shared_numbers(key, rows=slice(first, first + rows), total=rows * ranks)

    def passes(self, batch: dict[str, Any]) -> list[Tensor]:
        """Rows with a signal, few enough at a time that one pass holds ``pass_tokens``; the others are left out."""
        mask = batch["completion_mask"].bool()
        carrying = (batch["advantages"] != 0) & mask.any(-1)
        self.metric("forks/carrying_rows", float(carrying.float().mean()))
        kept = carrying.nonzero()[:, 0]
        if len(kept) == 0:  # every rank runs the model all the same, and gradients exist
            kept = torch.zeros(1, dtype=torch.long, device=mask.device)
        return self._split(batch, kept)

    def _split(self, batch: dict[str, Any], rows: Tensor, *, share: float = 1.0) -> list[Tensor]:
        mask = batch["completion_mask"].bool()
        tokens = self.args.pass_tokens or (_CPU_PASS if mask.device.type == "cpu" else _ACCELERATOR_PASS)
        chunks = split_rows(
            batch["prompt_ids"][rows],
            prompt_mask=batch["prompt_mask"][rows].bool(),
            completion_mask=mask[rows],
            shared=Calls.of(self.model).shares_prompt,
            tokens=max(int(tokens * share), 1),
        )
        return [rows[chunk] for chunk in chunks]

    def policy_loss(self, model: nn.Module, batch: dict[str, Any], *, rows: Tensor) -> Tensor:
        """``-A <delta, h>`` of these rows, in the normalization of TRL's ``loss_type`` over the whole micro-batch."""
        mask = batch["completion_mask"].bool()
        run = rows if len(rows) else torch.zeros(1, dtype=torch.long, device=mask.device)
        hidden = self._hidden(model, batch, rows=run)
        delta = batch["delta"][run, : hidden.shape[1]]
        losses = signal_loss(hidden, delta, advantages=batch["advantages"][run, None])
        if len(rows) == 0:  # a pass that only keeps other ranks company
            losses = losses * 0.0
        per_token = torch.zeros(mask.shape, dtype=losses.dtype, device=losses.device)
        per_token = per_token.index_put((run[:, None], torch.arange(losses.shape[1], device=run.device)), losses)
        kind, items = self.loss_type, accumulated_items(self, batch)
        loss = per_batch(per_token, mask, kind=kind, longest=self.max_completion_length, items=items)
        return loss if kind == "dapo" else loss / self.accumulation

    def _hidden(self, model: nn.Module, batch: dict[str, Any], *, rows: Tensor) -> Tensor:
        """``h`` of these rows' tokens, up to the longest of them."""
        mask = batch["completion_mask"].bool()
        length = max(int(mask[rows].sum(-1).max()), 1)
        start = int(batch["prompt_mask"][rows].long().argmax(-1).min())
        return completion_hidden(
            model,
            batch["prompt_ids"][rows, start:],
            prompt_mask=batch["prompt_mask"][rows, start:].bool(),
            completion_ids=batch["completion_ids"][rows, :length],
            completion_mask=mask[rows, :length],
        )

    def drawn_hidden(self) -> Tensor:
        """``h`` at this rank's drawn tokens in half a pass of the step's rollouts, as many as it holds: ``[m, d]``."""
        batch = joined(self.window)
        mask = batch["completion_mask"]
        rows = self._split(batch, torch.arange(len(mask), device=mask.device), share=0.5)[0]
        with evaluation_mode(self.model):  # dropout would change it between two looks
            hidden = self._hidden(self.model, batch, rows=rows)
        return hidden[mask[rows, : hidden.shape[1]]]

    def apart(self, before: Tensor, after: Tensor) -> Tensor:
        """KL(before | after) of the policy at each of these hidden states, ``[m, d]`` each: ``[m]``."""
        return divergences((before, after), (self._head, self._head), temperature=self.temperature)

    def finish_rollouts(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The recorded signal joins its rows; under ``value`` the advantage loses its average at each prefix.

        Both are done on the whole generation batch, so the gradient does not depend on how it is split afterwards.
        """
        ids, mask = batch["completion_ids"], batch["completion_mask"].bool()
        if self.args.score_centering == "sampler":
            delta = self.trace.delta.to(ids.device)
            delta = nn.functional.pad(delta, (0, 0, 0, ids.shape[1] - delta.shape[1]))
            return {**batch, "delta": delta, "group": self.trace.group.to(ids.device)}
        if self.args.score_centering == "value":
            group = same_prompt(batch["prompt_ids"], batch["prompt_mask"].bool())
            value = prefix_value(batch["advantages"], ids, mask=mask, group=group)
            return {**batch, "advantages": batch["advantages"][:, None] - value}
        return batch

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:  # noqa: ANN401
        """Plain SGD whose steps have the stated size, unless neither ``step_length`` nor ``step_kl`` is given."""
        trained = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        if not trained:
            raise ValueError("nothing to train: no parameter asks for a gradient.")
        refuse_narrow(trained, self.args)
        length, divergence = self.args.step_length, self.args.step_kl
        if (length is None and divergence is None) or self.optimizer is not None:
            return super().create_optimizer(*args, **kwargs)
        if self.is_fsdp_enabled:
            raise ValueError(
                f"step_length={length}, step_kl={divergence}: a stated step needs every matrix whole, and FSDP hands "
                "the optimizer flat pieces: set both to None and choose optim='sgd' (or another) with a learning_rate."
            )
        self.optimizer = stated_steps(self, trained)
        return self.optimizer

    def write_extras(self, folder: Path) -> None:
        """Beside a checkpoint: the adapter's own tensors to the bit, the bases, and each rank's latest trace."""
        tensors = adapter_tensors(self.model)
        if self.args.should_save and tensors:
            facts = {"step": str(self.state.global_step), "looked": self.looked.hex(), "folds": str(folded(self.model))}
            save_tensors(folder / _STATE, tensors, kind=_STATE_KIND, facts=facts)
        if self.args.should_save and self.bases is not None:
            self.bases.save(folder / _BASES)
        if self.trace is not None:
            self.trace.without_delta().save(folder / f"trace-{self.args.process_index}.safetensors")

    def read_extras(self, folder: Path) -> None:
        """Adapter and bases become those of the checkpoint, whatever was collected anew."""
        if (folder / _STATE).exists():
            tensors, facts = load_tensors(folder / _STATE, kind=_STATE_KIND)
            make_room(self.model, int(facts.get("folds", 0)))
            put_adapter_tensors(self.model, tensors)
            self.looked = float.fromhex(facts.get("looked", FIRST_LOOK.hex()))
        if (folder / _BASES).exists():
            self.bases = Bases.load(folder / _BASES)
        trace = folder / f"trace-{self.args.process_index}.safetensors"
        self.trace = Trace.load(trace) if trace.exists() else self.trace


def accumulated_items(trainer: SeamedGRPOTrainer, batch: dict[str, Any]) -> Tensor:
    """Tokens of one accumulation window on one rank: what TRL divides by under ``dapo``."""
    items = torch.clamp(batch["num_items_in_batch"], min=1.0) / trainer.accelerator.num_processes
    if trainer.model.training:
        items = items * trainer.accumulation / trainer.args.steps_per_generation
    return items


def _only_stops(args: ForkGRPOConfig, kwargs: dict[str, Any]) -> bool:
    """Stop strings alone are drawn here under every centering: TRL's generation is given no tokenizer to find them."""
    elsewhere = args.use_vllm or args.use_transformers_continuous_batching or args.cache_implementation
    foreign = any(kwargs.get(name) for name in _FOREIGN)
    return set(args.generation_kwargs or {}) == {"stop_strings"} and not elsewhere and not foreign


def _refuse_parts(args: ForkGRPOConfig, kwargs: dict[str, Any]) -> None:
    given = [name for name in _FOREIGN if kwargs.get(name)]
    if given and args.score_centering == "sampler":
        raise ValueError(
            f"score_centering='sampler' does not go with {', '.join(given)}: tokens that the trainer's own sampler "
            "did not draw have no recorded distribution. Use score_centering='none' or 'value'."
        )


def _sampler(args: ForkGRPOConfig, tokenizer: Any, stop_ids: list[int]) -> Sampler:  # noqa: ANN401
    return Sampler(
        max_new_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_k=args.top_k or 0,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        stop_ids=tuple(stop_ids),
        stop=stop_at(tokenizer, (args.generation_kwargs or {}).get("stop_strings") or ()),
    )


def _eos_ids(model: nn.Module, tokenizer: Any) -> list[int]:  # noqa: ANN401
    declared = model.generation_config.eos_token_id
    found = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    return sorted({*found, tokenizer.eos_token_id} - {None})


def _shuffled(data: Any, seed: int) -> Any:  # noqa: ANN401
    return data.shuffle(seed=seed) if hasattr(data, "shuffle") else data
