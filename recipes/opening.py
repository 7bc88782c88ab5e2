"""Loads a subject: the model, its tokenizer, the prompts as tokens, and the sampler that completes them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from forklora.recipes.demo import load_model
from forklora.recipes.evaluate import sampler_of
from forklora.recipes.refusal import Refusal
from forklora.recipes.subject import Subject, read_prompts
from forklora.recipes.tasks import Example, Split, Task
from jaxtyping import Float
from torch import Tensor, nn

from forklora.bases import encode
from forklora.rollouts import Sampler
from forklora.trace import Trace

_LENGTH = 64  # tokens of a completion, where neither a task nor the caller says


@dataclass(frozen=True)
class Opened:
    """A subject that has been loaded.

    Attributes:
        model: in evaluation mode.
        tokenizer: of the model.
        prompts: token ids of each prompt.
        examples: the questions with their answers; None where the prompts come from a file.
        sampler: how completions are drawn.
        task: what scores them; None where the prompts come from a file.
    """

    model: nn.Module
    tokenizer: Any
    prompts: list[list[int]]
    examples: list[Example] | None
    sampler: Sampler
    task: Task | None

    def rewards(self, trace: Trace, *, first: int, samples: int) -> Float[Tensor, " n"]:
        """Reward of each row of a trace whose prompts, ``samples`` rows of each, are those from ``first`` on.

        Raises:
            Refusal: the prompts come from a file, so nothing says what is right.
        """
        if self.task is None or self.examples is None:
            raise Refusal("prompts of a file have no reward; name a task to measure with one")
        found = []
        for i, (ids, mask) in enumerate(zip(trace.completion_ids, trace.completion_mask, strict=True)):
            text = self.tokenizer.decode(ids[mask], skip_special_tokens=True)
            found.append(self.task.score(text, self.examples[first + i // samples].answer))
        return torch.tensor(found)


def opened(subject: Subject, *, split: Split = "train") -> Opened:
    """Load the model and encode the prompts.

    Args:
        subject: what to load.
        split: of the task's questions; a file's prompts have none.

    Raises:
        Refusal: the model cannot be loaded, or a file holds no prompt.
    """
    task = subject.task.build() if subject.task is not None else None
    examples = task.examples(subject.count, seed=subject.seed, split=split) if task is not None else None
    asked = [e.prompt for e in examples] if examples is not None else read_prompts(Path(str(subject.prompts)))
    given, stop = subject.sampling, list(task.stop) if task is not None else []
    length = task.max_new_tokens if task is not None else _LENGTH
    settings = {"max_new_tokens": given.max_new_tokens or length, "stop": stop if given.stop is None else given.stop}
    model, tokenizer = load_model(subject.model.name, subject.model.dtype)
    prompts = [encode(tokenizer, prompt) for prompt in asked[: subject.count]]
    sampler = sampler_of(given.model_copy(update=settings), tokenizer)
    return Opened(model, tokenizer, prompts, examples, sampler, task)
