"""Asks a policy the held-out questions of a recipe: accuracy, and a map of the forks of a few answers.

Decisions: the questions come from the split that the recipe names and are the same for every arm; sampling has its own
seed and leaves the training's random state alone; ranks share the questions, and a row's luck depends on its place
among all of them, so the accuracy does not depend on the number of ranks; the map shows the policy before training,
where the bases come from.
"""

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from forklora.recipes.config import Recipe
from forklora.recipes.files import write_json
from forklora.recipes.options import SamplingSpec
from forklora.recipes.ranks import gathered, this_rank
from forklora.recipes.tasks import Task
from forklora.recipes.tokens import token_rows
from jaxtyping import Float
from torch import Tensor, nn

from forklora.bases import encode, seeded
from forklora.collective import ranks
from forklora.drawing import shared_numbers
from forklora.rollouts import Sampler, sample, stop_at
from forklora.trace import Trace
from forklora.unembed import read_unembedding

_BATCH = 32  # prompts sampled together
_MAPPED = 8  # rollouts on the fork map
_SEED = 20_000  # of evaluation: the same for all arms and seeds of a recipe


class Examiner:
    """The held-out questions of a recipe and everything that is asked of a policy with them."""

    def __init__(self, recipe: Recipe, task: Task, *, tokenizer: Any) -> None:  # noqa: ANN401
        count = recipe.evaluation.prompts
        self.questions = task.examples(count, seed=_SEED, split=recipe.evaluation.split)
        self.prompts = [encode(tokenizer, e.prompt) for e in self.questions]
        self.samples, self.task, self.tokenizer = recipe.evaluation.samples, task, tokenizer
        self.sampler = sampler_of(recipe.sampling, tokenizer)
        self.seconds = 0.0

    def accuracy(self, model: nn.Module) -> float:
        """Mean reward over all questions and samples, at the recipe's own sampling settings.

        Every rank calls this, with a model whose weights it holds whole, and gets the same number.
        """
        start = time.perf_counter()
        found = self.table(model, samples=self.samples).mean()
        self.seconds += time.perf_counter() - start
        return float(found)

    def table(self, model: nn.Module, *, samples: int) -> Float[Tensor, "questions samples"]:
        """Reward of each of ``samples`` completions of every question, float64; every rank calls this, as above.

        With the recipe's own number of samples these are the completions that the accuracy is taken from; another
        number has draws of its own.
        """
        key = f"evaluation/{_SEED}" if samples == self.samples else f"evaluation/{_SEED}/{samples}"
        head = read_unembedding(model, self.tokenizer, check=False)
        portion, found = min(_BATCH, math.ceil(len(self.prompts) / ranks())), {}
        for i in range(this_rank() * portion, len(self.prompts), ranks() * portion):
            prompts = self.prompts[i : i + portion]
            rows = slice(i * samples, (i + len(prompts)) * samples)
            luck = shared_numbers(key, rows=rows, total=len(self.prompts) * samples)
            trace = sample(
                model, prompts, sampler=self.sampler, group=samples, unembedding=head, record=False, luck=luck
            )
            found[i] = self.rewards(trace, first=i, samples=samples)
        parts = {i: rewards for part in gathered(found) for i, rewards in part.items()}
        rewards = [reward for i in sorted(parts) for reward in parts[i]]
        return torch.tensor(rewards, dtype=torch.float64).view(-1, samples)

    def rewards(self, trace: Trace, *, first: int, samples: int) -> list[float]:
        """Reward of each row of a trace whose prompts are the questions from ``first`` on."""
        texts = [
            self.tokenizer.decode(ids[mask], skip_special_tokens=True)  # as the trainer reads them
            for ids, mask in zip(trace.completion_ids, trace.completion_mask, strict=True)
        ]
        return [self.task.score(t, self.questions[first + i // samples].answer) for i, t in enumerate(texts)]

    def map_forks(self, model: nn.Module, folder: Path) -> None:
        """Write ``forks.safetensors`` (the trace) and ``tokens.json`` (the same in words) of a few rollouts."""
        head = read_unembedding(model, self.tokenizer, check=False)
        with seeded(_SEED + 1):
            trace = sample(model, self.prompts[:_MAPPED], sampler=self.sampler, unembedding=head).without_delta()
        rewards = self.rewards(trace, first=0, samples=1)
        trace = replace(trace, reward=torch.tensor(rewards))
        trace.save(folder / "forks.safetensors")
        write_json(folder / "tokens.json", {"rows": token_rows(trace, self.tokenizer.decode)})


def sampler_of(asked: SamplingSpec, tokenizer: Any) -> Sampler:  # noqa: ANN401
    """Sampling settings as the sampler that training, evaluation and measurements share."""
    return Sampler(
        max_new_tokens=asked.max_new_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        min_p=asked.min_p,
        stop_ids=(tokenizer.eos_token_id,),
        stop=stop_at(tokenizer, asked.stop or ()),
    )
