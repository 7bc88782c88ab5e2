"""What `forklora bench` measures: shapes of a step, points of growth, repetitions; read from `key=value` strings.

A shape is written prompt/completion/group/prompts/rows: tokens of a prompt, tokens of a completion, completions of a
prompt, prompts of a step, rows of a micro-batch. Prompts and rows may be left out.

    python -c "from forklora.recipes.bench_plan import load_plan; print(load_plan(['shapes=40/5/8,64/64/8']))"
"""

from typing import Annotated, Any, Literal, NamedTuple

from forklora.recipes.options import Closed, ModelSpec, Positive
from forklora.recipes.reading import checked_options
from pydantic import AfterValidator, BeforeValidator, Field, Strict

SHAPES = ("40/5/8/16/128", "64/64/8/4/32", "64/256/8/4/16", "512/32/8/4/8", "40/40/2/32/64")
SPARE_STEPS = 2  # of prompts beside the timed ones: the untimed step, and one that is never begun
_PROMPTS = 4  # of a step, where a shape that is not in SHAPES does not say
_ROW_TOKENS = 6_000  # in a micro-batch, where a shape does not say: TRL then fits in 24 GB on SmolLM2-135M


class Shape(Closed):
    """One training step: how many tokens, and in how many rows at a time they go through TRL's model."""

    prompt: Positive
    """Tokens of a prompt."""
    completion: Positive
    """Tokens of a completion."""
    group: int = Field(ge=2)
    """Completions of a prompt."""
    prompts: Positive
    """Prompts of a step."""
    rows: Positive
    """Rows of a micro-batch, `per_device_train_batch_size` on both sides."""

    @property
    def label(self) -> str:
        """The first three numbers, as in tables and plots."""
        return f"{self.prompt}/{self.completion}/{self.group}"

    @property
    def text(self) -> str:
        """All five numbers, as an override writes them."""
        return f"{self.label}/{self.prompts}/{self.rows}"

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step."""
        return self.prompts * self.group // self.rows


class Point(NamedTuple):
    """One point of a growth curve: what is grown, how far, and the step that shows it."""

    family: str
    factor: float
    shape: str
    vocabulary: int | None = None


GROWTH = (
    *(Point("rollouts", prompts // 8, f"40/5/8/{prompts}") for prompts in (8, 16, 32)),
    *(Point("completion length", length // 16, f"40/{length}/8/8") for length in (16, 32, 64)),
    *(Point("vocabulary", size / 8_192, "64/32/8/4", size) for size in (8_192, 32_768, 151_936)),
)


class SideSpec(Closed):
    """All that one side's process needs to know."""

    side: Literal["trl", "ours"]
    """Whose trainer runs."""
    shape: Shape
    """The step."""
    model: ModelSpec
    """The policy, unless there is a `vocabulary`."""
    vocabulary: Positive | None = None
    """Words of a small random policy that takes the model's place."""
    repeats: Positive
    """Timed steps."""
    seed: int
    """Seed of prompts, rewards, rollouts and adapters."""


def read_shape(text: str) -> Shape:
    """The shape written in a text. Raises ValueError where it is none."""
    parts = text.strip().split("/")
    if not 3 <= len(parts) <= 5 or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"{text!r} is no shape; write prompt/completion/group[/prompts[/rows]], such as 64/64/8/4/32")
    known = next((shape for shape in SHAPES if shape.startswith(f"{text.strip()}/") and len(parts) == 3), None)
    prompt, completion, group, *rest = map(int, known.split("/") if known else parts)
    if group < 2:
        raise ValueError(f"{text!r} has groups of {group}; two completions at least are compared")
    prompts = rest[0] if rest else _PROMPTS
    rollouts, most = prompts * group, max(1, _ROW_TOKENS // (prompt + completion))
    rows = rest[1] if len(rest) > 1 else max(n for n in range(1, rollouts + 1) if rollouts % n == 0 and n <= most)
    if rollouts % rows:
        raise ValueError(f"{text!r} has {rollouts} rollouts in a step, which rows of {rows} do not divide")
    return Shape(prompt=prompt, completion=completion, group=group, prompts=prompts, rows=rows)


def _listed(given: Any) -> Any:  # noqa: ANN401 - whatever stands behind shapes=
    return given.split(",") if isinstance(given, str) else given


def _complete(given: tuple[str, ...]) -> tuple[str, ...]:
    shapes = tuple(read_shape(text).text for text in given)
    if repeated := sorted({text for text in shapes if shapes.count(text) > 1}):
        raise ValueError(f"given more than once: {', '.join(repeated)}")
    return shapes


class BenchPlan(Closed):
    """One comparison of training steps."""

    model: ModelSpec = ModelSpec()
    shapes: Annotated[
        tuple[str, ...], Strict(False), Field(min_length=1), BeforeValidator(_listed), AfterValidator(_complete)
    ] = SHAPES
    """Steps to compare, `prompt/completion/group[/prompts[/rows]]` with commas between."""
    repeats: Positive = 2
    """Timed steps of each side and shape, after one that is not timed."""
    growth: bool = True
    """Also measure how our own step grows with rollouts, completion length and vocabulary."""
    seed: int = Field(0, ge=0)
    """Seed of prompts, rewards, rollouts and adapters."""
    output: str = Field("runs/bench", min_length=1)
    """Folder for bench.json and bench.svg; the results of another plan in it are replaced."""

    @property
    def points(self) -> tuple[Point, ...]:
        """The points of growth that are asked for."""
        return GROWTH if self.growth else ()

    def spec(self, side: Literal["trl", "ours"], shape: Shape, *, vocabulary: int | None = None) -> SideSpec:
        """What one side's process is told about one step."""
        model = ModelSpec(name="random", dtype="float32") if vocabulary else self.model
        given = {"vocabulary": vocabulary, "repeats": self.repeats, "seed": self.seed}
        return SideSpec(side=side, shape=shape, model=model, **given)


def load_plan(overrides: list[str]) -> BenchPlan:
    """The plan with overrides such as `repeats=1`, `model.name=FOLDER`. Raises a Refusal with every complaint."""
    return checked_options(BenchPlan, {}, overrides=overrides, problem="this cannot be measured")
