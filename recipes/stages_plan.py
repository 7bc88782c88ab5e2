"""What `forklora stages` runs: cells of a matrix, the cell each is held against, and limits with their reasons.

A cell is five optimizer steps of the real trainer on a tiny random model, in one combination of DeepSpeed stage, base
precision, number of ranks, gradient accumulation, kind of adapter and optimizer. All have the same 16 rollouts a step.

    python -c "from forklora.recipes.stages_plan import load_stages; print(load_stages(['stages=0,3', 'ranks=2']))"
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from forklora.recipes.options import Closed, Positive
from forklora.recipes.reading import checked_options
from pydantic import AfterValidator, BeforeValidator, Field, Strict, model_validator

STEPS, PROMPTS, GROUP, COMPLETION = 5, 4, 4, 6  # optimizer steps; prompts of a step; completions of each; their tokens
ROLLOUTS = PROMPTS * GROUP

Stage = Literal["none", "0", "1", "2", "3"]
Dtype = Literal["float32", "bfloat16"]
Kind = Literal["span", "core", "inputs", "block", "collected"]
Optimizer = Literal["sgd", "adamw", "length", "kl"]

# What each kind asks of ForkLoraConfig. `collected` brings no bases: every rank of the trainer collects them.
ADAPTERS: dict[str, dict[str, Any]] = {
    "span": {"kind": "span", "r": 2},
    "core": {"kind": "core", "r": 2, "width": 4},
    "inputs": {"kind": "inputs", "r": 2},
    "block": {"kind": "block", "r": 2, "width": 4},
    "collected": {"kind": "block", "r": 2, "width": 4},
}


class Limit(NamedTuple):
    """The largest value of a measure that passes, by the precision of the base, and why it is not zero or larger."""

    float32: float
    bfloat16: float
    why: str


LIMITS = {
    "outside": Limit(1e-6, 1e-3, "factors are products in float32; the base's precision does not enter them"),
    "base": Limit(0, 0, "frozen weights are compared bit for bit"),
    "export": Limit(0, 0, "adapter tensors are compared bit for bit, in the file and in stock PEFT that has read it"),
    "copies": Limit(0, 0, "every rank holds the same adapter and the same bases, bit for bit"),
    "reload": Limit(
        1e-6, 0.02, "stock PEFT may add the low-rank term in another order, and rounds to the base's precision"
    ),
    "curve": Limit(1e-6, 1e-6, "float32: equal draws; in bfloat16 all cells train on one cell's rollouts"),
    "distance": Limit(
        1e-5, 0.1, "float32: sums in another order; bfloat16: its rounding, 2^-8 a number, changes with the rows"
    ),
}


class Cell(Closed):
    """One combination."""

    stage: Stage
    """DeepSpeed's ZeRO stage; `none` is training without DeepSpeed."""
    dtype: Dtype
    """Precision of the frozen weights."""
    ranks: Positive
    """Processes."""
    accumulation: Positive
    """Micro-batches of a step."""
    kind: Kind
    """Which adapter."""
    optimizer: Optimizer
    """Which optimizer."""

    @property
    def name(self) -> str:
        """What its folder is called."""
        stage = "none" if self.stage == "none" else f"zero{self.stage}"
        return f"{stage}-{self.ranks}-{self.dtype}-{self.accumulation}-{self.kind}-{self.optimizer}"

    def folder(self, output: Path) -> Path:
        """Where it writes."""
        return output / "cells" / self.name

    @property
    def rows(self) -> int:
        """Rows of a micro-batch on one rank."""
        return ROLLOUTS // (self.ranks * self.accumulation)

    @property
    def single(self) -> "Cell":
        """No DeepSpeed, one process, one micro-batch; ranks that collect bases draw rollouts of their own for them."""
        ranks = self.ranks if self.kind == "collected" else 1
        return self.model_copy(update={"stage": "none", "ranks": ranks, "accumulation": 1})


def _words(given: Any) -> Any:  # noqa: ANN401 - whatever stands behind the key
    parts = given.split(",") if isinstance(given, str) else given if isinstance(given, list | tuple) else [given]
    return [part.strip() if isinstance(part, str) else str(part) for part in parts]


def _numbers(given: Any) -> Any:  # noqa: ANN401
    parts = given.split(",") if isinstance(given, str) else given if isinstance(given, list | tuple) else [given]
    return [int(part) if isinstance(part, str) and part.strip().isdecimal() else part for part in parts]


def _once(given: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(given))


_Listed = (Strict(False), Field(min_length=1), AfterValidator(_once))


class StagesPlan(Closed):
    """A part of the matrix, or all of it."""

    stages: Annotated[tuple[Stage, ...], BeforeValidator(_words), *_Listed] = ("none", "0", "1", "2", "3")
    """ZeRO stages, with commas between; `none` is training without DeepSpeed."""
    dtypes: Annotated[tuple[Dtype, ...], BeforeValidator(_words), *_Listed] = ("float32", "bfloat16")
    """Precisions of the base."""
    ranks: Annotated[tuple[Positive, ...], BeforeValidator(_numbers), *_Listed] = (1, 2)
    """Numbers of processes."""
    accumulation: Annotated[tuple[Positive, ...], BeforeValidator(_numbers), *_Listed] = (1, 4)
    """Numbers of micro-batches in a step."""
    kinds: Annotated[tuple[Kind, ...], BeforeValidator(_words), *_Listed] = tuple(ADAPTERS)
    """Kinds of adapters; `collected` is a block whose bases the trainer collects (step length, one micro-batch)."""
    optimizers: Annotated[tuple[Optimizer, ...], BeforeValidator(_words), *_Listed] = ("sgd", "adamw", "length")
    """Optimizers; `length` is SGD whose step has a stated length."""
    processes: Positive | None = None
    """Most processes at a time; null is the number of cores."""
    output: str = Field("runs/stages", min_length=1)
    """Folder for stages.json and what every cell wrote."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        for ranks, parts in itertools.product(self.ranks, self.accumulation):
            if ROLLOUTS % (ranks * parts):
                raise ValueError(f"ranks={ranks} with accumulation={parts} do not divide the {ROLLOUTS} rollouts")
        if not self.cells:
            raise ValueError("nothing is left to run: kind 'collected' exists with optimizer 'length' only")
        return self

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The cells asked for."""
        return tuple(self._combined())

    def _combined(self) -> Iterator[Cell]:
        rest = (self.ranks, self.accumulation, self.dtypes, self.kinds, self.optimizers)
        first = self.accumulation[0]
        for stage, ranks, parts, dtype, kind, optimizer in itertools.product(self.stages, *rest):
            if kind == "collected" and (optimizer, parts) != ("length", first):
                continue
            given = {"stage": stage, "dtype": dtype, "ranks": ranks, "accumulation": parts}
            yield Cell(**given, kind=kind, optimizer=optimizer)

    @property
    def needed(self) -> tuple[Cell, ...]:
        """The cells asked for, after those they are held against."""
        return tuple(dict.fromkeys([*(c.single for c in self.cells), *self.cells]))


def load_stages(overrides: list[str]) -> StagesPlan:
    """The plan with overrides such as `stages=0,3`, `kinds=span`. Raises a Refusal with every complaint."""
    return checked_options(StagesPlan, {}, overrides=overrides, problem="these cells cannot be run")
