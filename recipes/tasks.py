"""Names a set of questions together with its verifiable reward.

Every task writes few-shot text that ends where the answer begins, stops at a newline, and pays 1 for a completion whose
first line is the answer, 0 for anything else. Each question is drawn from a generator seeded by (task, split, seed)
alone: the global random state is neither read nor moved.

How the splits are kept apart, and what that does not promise:

* `multiplication`, `addition`: by a hash of the whole prompt text, so no prompt of one split ever occurs in another.
  The final question may: there are only 121 products of factors 2 to 12 (676 sums of terms 5 to 30), and a policy will
  have met most of them, or their solutions among the examples, in training. The score there measures whether the model
  answers arithmetic it can be expected to know, not whether it generalizes to unseen numbers.
* `reasoning_gym`: by a hash of the final question itself. Solved examples come from the training split everywhere.
* `tool_choice`: by hand. The splits share neither sentence patterns nor what fills them, only the names of the tools.

    python -c "from forklora.recipes.tasks import task; print(task('multiplication').examples(1, seed=0, split='test'))"
"""

import hashlib
import inspect
import operator
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, get_args

from forklora.recipes.refusal import Refusal
from forklora.recipes.requests import TOOLS
from forklora.recipes.wording import nearest
from pydantic import ConfigDict, ValidationError, validate_call

Split = Literal["train", "validation", "test"]
_SPLITS = get_args(Split)
_DRAWS = 10_000
_Drawn = TypeVar("_Drawn")


class TaskError(Refusal):
    """A task that cannot be built as asked; the message says what is allowed."""


@dataclass(frozen=True)
class Example:
    """A prompt, and the answer its completion is scored against."""

    prompt: str | list[dict[str, str]]
    answer: str


def score_first_line(completion: str, answer: str) -> float:
    """1.0 if the first line of `completion`, surrounding spaces removed, is `answer` and the line is ended; else 0.0.

    A completion without a newline has not finished its answer: `12` may still have become `120`.
    """
    line, newline, _ = completion.partition("\n")
    return float(bool(newline) and line.strip() == answer)


@dataclass(frozen=True)
class Task:
    """Questions, each belonging to one split, with their reward.

    Attributes:
        name: the task's name in the registry.
        draw: makes one example of the split from a random generator; examples of different splits never coincide.
        score: reward of a completion given the answer, between 0 and 1.
        max_new_tokens: enough tokens for any right answer and its stop.
        stop: strings that end a completion.
    """

    name: str
    draw: Callable[[random.Random, Split], Example]
    score: Callable[[str, str], float] = score_first_line
    max_new_tokens: int = 8
    stop: tuple[str, ...] = ("\n",)

    def question(self, seed: int, split: Split) -> Example:
        """The example with this seed in this split: always the same one, whatever was drawn before."""
        if split not in _SPLITS:
            raise TaskError(f"split {split!r} is not one of {', '.join(_SPLITS)}")
        return self.draw(random.Random(f"{self.name}/{split}/{seed}"), split)

    def examples(self, n: int, *, seed: int, split: Split) -> list[Example]:
        """The first `n` examples of an endless sequence that is fixed by `seed` and `split`."""
        return [self.question((seed << 32) + i, split) for i in range(n)]


def task_names() -> list[str]:
    """Names that `task` knows."""
    return sorted(_TASKS)


def task(name: str, **options: Any) -> Task:  # noqa: ANN401 - options are the keyword arguments of any one task
    """The task of that name.

    Args:
        name: one of `task_names()`.
        options: what the task's own builder takes (`shots`, `low`, `high`; `dataset`, `settings`; ...).

    Raises:
        TaskError: unknown name or option (the nearest one is named), or a value the task cannot use.
    """
    if name not in _TASKS:
        raise TaskError(f"unknown task {name!r}{nearest(name, task_names())}; there are: {', '.join(task_names())}")
    allowed = list(inspect.signature(_TASKS[name]).parameters)
    for option in options:
        if option not in allowed:
            hint = nearest(option, allowed)
            raise TaskError(f"unknown option {option!r} of task {name!r}{hint}; it takes: {', '.join(allowed)}")
    try:
        return validate_call(config=ConfigDict(strict=True))(_TASKS[name])(**options)
    except ValidationError as error:
        found = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        raise TaskError(f"the options of task {name!r} do not fit: {'; '.join(found)}") from error


def split_of(text: str) -> Split:
    """The split a text belongs to, by its hash alone: 80 % train, 10 % validation, 10 % test."""
    share = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
    return "train" if share < 0.8 else "validation" if share < 0.9 else "test"


def _of_split(split: Split, make: Callable[[], _Drawn], *, key: Callable[[_Drawn], str]) -> _Drawn:
    """Draws from `make` until something of the split comes up."""
    for _ in range(_DRAWS):
        if split_of(key(found := make())) == split:
            return found
    raise TaskError(f"no question of the split {split!r} in {_DRAWS} draws: the task has too few different questions")


def _arithmetic(symbol: str, *, low: int, high: int, shots: int) -> Callable[[random.Random, Split], Example]:
    """Solved examples `a * b = c`, one a line, and one left open; factors or terms uniform in low..high."""
    if not 0 <= low < high or shots < 0:
        raise TaskError(f"need 0 <= low < high and shots >= 0, got low={low}, high={high}, shots={shots}")
    solve = {"*": operator.mul, "+": operator.add}[symbol]

    def make(rng: random.Random) -> Example:
        pairs = [(rng.randint(low, high), rng.randint(low, high)) for _ in range(shots + 1)]
        lines = [f"{a} {symbol} {b} =" for a, b in pairs]
        solved = "".join(f"{line} {solve(a, b)}\n" for line, (a, b) in zip(lines[:-1], pairs[:-1], strict=True))
        return Example(solved + lines[-1], str(solve(*pairs[-1])))

    return lambda rng, split: _of_split(split, partial(make, rng), key=lambda example: str(example.prompt))


def _digits(number: int) -> int:
    return len(str(number))


def _multiplication(*, low: int = 2, high: int = 12, shots: int = 3) -> Task:
    return Task(
        "multiplication", _arithmetic("*", low=low, high=high, shots=shots), max_new_tokens=_digits(high * high) + 2
    )


def _addition(*, low: int = 5, high: int = 30, shots: int = 3) -> Task:
    return Task("addition", _arithmetic("+", low=low, high=high, shots=shots), max_new_tokens=_digits(2 * high) + 2)


def _reasoning_gym(
    *, dataset: str, shots: int = 3, settings: dict[str, Any] | None = None, form: str = "Question: {}\nAnswer:"
) -> Task:
    """Any reasoning-gym data set with one right, short, one-line answer to each question.

    `settings` are the data set's own; `form` is a question's frame, its `{}` standing for the question, and a solved
    example is the framed question, a space, its answer and a newline. Scored by exact match, not by the data set's
    graded scorer.
    """
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise TaskError('the task reasoning_gym needs a package: pip install "forklora[demo]"') from error
    known = sorted(reasoning_gym.factory.DATASETS)
    if "{}" not in form:
        raise TaskError(f"form {form!r} lacks the place {{}} where the question goes")
    if dataset not in known:
        raise TaskError(f"unknown reasoning-gym data set {dataset!r}{nearest(dataset, known)}")
    size = 2**20
    try:
        source = reasoning_gym.create_dataset(dataset, seed=0, size=size, **(settings or {}))
    except (AssertionError, TypeError, ValueError) as error:
        raise TaskError(f"settings {settings} do not fit the reasoning-gym data set {dataset!r}: {error}") from error

    def entry(rng: random.Random) -> tuple[str, str]:
        found = source[rng.randrange(size)]
        return form.replace("{}", str(found["question"]).strip()), str(found["answer"]).strip()

    def draw(rng: random.Random, split: Split) -> Example:
        solved = [_of_split("train", partial(entry, rng), key=operator.itemgetter(0)) for _ in range(shots)]
        question, answer = _of_split(split, partial(entry, rng), key=operator.itemgetter(0))
        return Example("".join(f"{q} {a}\n" for q, a in solved) + question, answer)

    return Task("reasoning_gym", draw, max_new_tokens=12)


def _tool_choice(*, tools: int = 4, shots: int = 3) -> Task:
    """A request and the names of a few tools; the reply is the name of the one that serves the request."""
    if not 2 <= tools <= len(TOOLS) or shots < 0:
        raise TaskError(f"need 2 <= tools <= {len(TOOLS)} and shots >= 0, got tools={tools}, shots={shots}")

    def entry(rng: random.Random, names: list[str], *, split: Split) -> tuple[str, str]:
        name = rng.choice(names)
        pattern, filler = (rng.choice(part[_TOOL_PARTS[split]]) for part in TOOLS[name])
        return f"Tools: {', '.join(names)}\nRequest: {pattern.format(filler)}\nTool:", name

    def draw(rng: random.Random, split: Split) -> Example:
        names = rng.sample(sorted(TOOLS), tools)
        solved = [entry(rng, names, split="train") for _ in range(shots)]
        question, answer = entry(rng, names, split=split)
        return Example("".join(f"{q} {a}\n" for q, a in solved) + question, answer)

    return Task("tool_choice", draw)


_TOOL_PARTS: dict[Split, slice] = {"train": slice(0, 4), "validation": slice(4, 6), "test": slice(6, None)}
_TASKS: dict[str, Callable[..., Task]] = {
    "multiplication": _multiplication,
    "addition": _addition,
    "reasoning_gym": _reasoning_gym,
    "tool_choice": _tool_choice,
}
