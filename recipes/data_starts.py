"""Starts those LoRA adapters that look at data first: EVA at the prompts' activations, LoRA-GA at a first gradient.

Decisions: both look at ``forks.prompts`` training questions of the run's own task and seed, as many as the fork
adapters get. EVA reads them on rank 0 and hands its factors to all. LoRA-GA gets the gradient that a user of
reinforcement learning has at the start: that of the policy's own rollouts, with rewards centered per group; ranks share
the prompts, and what is drawn for one does not depend on their number. Its size is that of the trainer's own loss.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from forklora.recipes.config import Recipe
from forklora.recipes.evaluate import sampler_of
from forklora.recipes.options import Arm
from jaxtyping import Float
from peft import LoraConfig, PeftConfig, get_peft_model
from peft.tuners.lora.eva import get_eva_state_dict, initialize_lora_eva_weights
from peft.tuners.lora.loraga import preprocess_loraga
from torch import Tensor, distributed, nn

from forklora.backward import backward, layer_shape, listening
from forklora.bases import drawn, encode
from forklora.collective import from_first, rank, ranks, several, summed
from forklora.forward import Calls
from forklora.rollouts import pad_prompts, sample
from forklora.targets import target_layers
from forklora.trace import Trace

NEEDS_DATA = ("eva", "lora_ga")
_BATCH = 8  # prompts at a time
Reward = Callable[..., list[float]]


@dataclass(frozen=True)
class Started:
    """What a trainer is given.

    Attributes:
        model: with an adapter on it, where it needs no further configuration.
        config: of the adapter that is still to be made; None where it is there.
        rollouts: drawn for it.
    """

    model: nn.Module
    config: PeftConfig | None
    rollouts: int


def started(
    recipe: Recipe,
    arm: Arm,
    *,
    model: nn.Module,
    tokenizer: Any,  # noqa: ANN401
    config: PeftConfig | None,
    reward: Reward,
) -> Started:
    """Let an adapter see the data it starts from; others stay as they are. Every rank has to call this.

    Args:
        recipe: task, sampling, seed; and ``forks.prompts``, how many questions are looked at.
        arm: says with ``init`` what is looked at.
        model: the base model, where it is trained.
        tokenizer: of the model.
        config: of the arm's adapter.
        reward: of completions and answers, for LoRA-GA.

    Raises:
        ValueError: too few prompts or tokens, or no gradient for LoRA-GA, because no reward differs within a group.
    """
    if arm.init not in NEEDS_DATA or not isinstance(config, LoraConfig):
        return Started(model, config, 0)
    questions = recipe.task.build().examples(recipe.forks.prompts, seed=recipe.seed, split="train")
    prompts = [encode(tokenizer, question.prompt) for question in questions]
    if len(prompts) < ranks():
        raise ValueError(f"forks.prompts={len(prompts)} are too few for {ranks()} ranks; each takes a share of them")
    if arm.init == "eva":
        return Started(_with_eva(model, config, prompts, pad=tokenizer.pad_token_id), None, 0)
    traces = _rollouts(recipe, model, prompts, tokenizer=tokenizer)
    signals = [
        _advantages(recipe, trace, [q.answer for q in part], tokenizer=tokenizer, reward=reward)
        for trace, part in zip(traces, _portions(questions), strict=True)
    ]
    if not summed(sum(int(signal.any()) for signal in signals)):
        raise ValueError("LoRA-GA: no reward differs within a group of rollouts, so there is no gradient to start from")
    _hand_over(model, config, list(zip(traces, signals, strict=True)))
    return Started(model, config, len(prompts) * recipe.group)


def _with_eva(model: nn.Module, config: LoraConfig, prompts: list[list[int]], *, pad: int) -> nn.Module:
    """The model with an adapter whose ``A`` are the leading principal directions of each layer's inputs."""
    adapted: Any = get_peft_model(model, config)  # pyright: ignore[reportArgumentType] - any module will do
    batches = []
    for i in range(0, len(prompts), _BATCH):
        ids, mask = pad_prompts(prompts[i : i + _BATCH], pad)
        batches.append({"input_ids": ids, "attention_mask": mask.long()})
    wanted = 1 if config.eva_config is None else round(config.r * config.eva_config.rho)
    if all(int(batch["attention_mask"].sum()) < wanted for batch in batches):  # PEFT would look for more for ever
        raise ValueError(f"EVA: rank {config.r} takes {wanted} tokens in a batch of {_BATCH} prompts; add prompts")

    def forward(policy: nn.Module, batch: dict[str, Tensor]) -> None:
        ids, mask = batch["input_ids"], batch["attention_mask"].bool()
        policy(input_ids=ids, **Calls.of(policy).arguments(mask, length=ids.shape[1], cache=None))

    def found() -> dict[str, Tensor]:
        quiet: dict[str, Any] = {"gather_distributed_inputs": False, "show_progress_bar": False}
        state = get_eva_state_dict(adapted, batches, forward_fn=forward, **quiet)
        return {name: factor.cpu() for name, factor in state.items()}

    initialize_lora_eva_weights(adapted, eva_state_dict=from_first(found))
    for parameter in adapted.parameters():
        if parameter.requires_grad:  # factors of another rank are made anew, in the base's own precision
            parameter.data = parameter.data.float()
    return adapted


def _portions(values: list[Any]) -> list[list[Any]]:
    """This rank's share, a few at a time."""
    mine = values[rank() :: ranks()]
    return [mine[i : i + _BATCH] for i in range(0, len(mine), _BATCH)]


def _rollouts(
    recipe: Recipe,
    model: nn.Module,
    prompts: list[list[int]],
    *,
    tokenizer: Any,  # noqa: ANN401
) -> list[Trace]:
    sampler, traces, group = sampler_of(recipe.sampling, tokenizer), [], recipe.group
    for places in _portions(list(range(len(prompts)))):
        luck, _ = drawn(places, group=group, length=sampler.max_new_tokens, seed=recipe.seed)
        traces.append(sample(model, [prompts[i] for i in places], sampler=sampler, group=group, luck=luck))
    return traces


def _advantages(
    recipe: Recipe,
    trace: Trace,
    answers: list[str],
    *,
    tokenizer: Any,  # noqa: ANN401
    reward: Reward,
) -> Float[Tensor, " n"]:
    """Rewards less their mean in each group, over what the trainer's loss divides by: rollouts times longest length."""
    texts = [
        tokenizer.decode(ids[mask], skip_special_tokens=True)
        for ids, mask in zip(trace.completion_ids, trace.completion_mask, strict=True)
    ]
    repeated = [answer for answer in answers for _ in range(recipe.group)]
    rewards = torch.tensor(reward(completions=texts, answer=repeated)).view(-1, recipe.group)
    share = recipe.forks.prompts * recipe.group * (recipe.sampling.max_new_tokens or 1)
    return (rewards - rewards.mean(1, keepdim=True)).flatten() / share


def _hand_over(model: nn.Module, config: LoraConfig, batches: list[tuple[Trace, Tensor]]) -> None:
    """Give PEFT the gradient ``-sum A delta`` of each layer's weight, over the rollouts of all ranks."""
    every: dict[str, Any] = dict(model.named_modules())
    modules = {name: every[name] for name in target_layers(model, config)}
    config.target_modules = list(modules)  # PEFT does not know "all-linear" here
    sums = {name: _zeros(module) for name, module in modules.items()}
    calls: Counter[str] = Counter()

    def receive(name: str, *seen: Tensor) -> None:
        x, g = seen
        sums[name] -= g.flatten(0, -2).float().T @ x.flatten(0, -2).float()
        calls[name] += 1

    def step() -> None:
        with listening(modules, receive):
            for trace, advantages in batches:
                backward(model, trace, advantages=advantages)
        for name, module in modules.items():
            if several():
                distributed.all_reduce(sums[name])
            gradient = sums[name].T if type(module).__name__ == "Conv1D" else sums[name]
            module.weight.grad = (gradient * calls[name]).to(module.weight.dtype)  # PEFT takes a mean over calls

    preprocess_loraga(model, config, step)


def _zeros(module: nn.Module) -> Float[Tensor, "o i"]:
    device = next(module.parameters()).device
    return torch.zeros(layer_shape(module), dtype=torch.float32, device=device)
