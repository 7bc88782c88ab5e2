"""Compares one training step of ours with one of TRL's, alternating in one run, and shows how our own step grows.

Decisions: each side of a shape is a process of its own, so that its peak memory is its own; both stand ready at once
and one works while the other waits, so that both meet the same state of the machine; ratios are formed between steps
that followed each other. The parent loads no model: a process starts with the peak memory of the one that made it.
Rewards differ within every group, so no row is skipped; ours is given random bases, whose one-time collection is no
part of a step. A side that dies is recorded as failed, and the others go on.

    forklora bench shapes=40/5/8,64/64/8 repeats=3 growth=false
"""

import contextlib
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forklora.recipes.bench_inputs import exact_prompts
from forklora.recipes.bench_plan import SPARE_STEPS, BenchPlan, Point, Shape, SideSpec, read_shape
from forklora.recipes.bench_plot import bench_plot
from forklora.recipes.bench_process import SideError, SideProcess
from forklora.recipes.demo import DEMO_NAME, demo_model_folder, demo_weights
from forklora.recipes.files import write_json, write_text
from forklora.recipes.provenance import provenance
from forklora.recipes.refusal import Refusal
from tqdm.auto import tqdm

PHASES = {"step": "seconds", "sampling": "sampling", "scoring": "scoring", "update": "update"}
_SAME_PLACE = ("versions", "hardware")  # of numbers that may stand in one table
_CONVERT = "from forklora.recipes.demo import demo_model_folder; demo_model_folder()"


def run_bench(plan: BenchPlan, *, overwrite: bool = False) -> dict[str, Any]:
    """Measure what the plan says into ``plan.output``; returns what bench.json holds, failed sides among it.

    Args:
        plan: what to measure.
        overwrite: measure again what is done.
    """
    file = Path(plan.output) / "bench.json"
    result: dict[str, Any] = {"plan": plan.model_dump(mode="json"), **provenance()}
    tasks = [
        *(_shape_task(plan, read_shape(text)) for text in plan.shapes),
        *(_point_task(plan, p) for p in plan.points),
    ]
    earlier = [] if overwrite else finished_entries(file, result)
    entries = [next((e for e in earlier if e["task"] == task), None) for task, _ in tasks]
    turns = sum(len(specs) * (1 + plan.repeats) for (_, specs), e in zip(tasks, entries, strict=True) if e is None)
    with tqdm(total=turns, unit="step", desc="bench", disable=turns == 0) as bar:
        for place, (task, specs) in enumerate(tasks):
            if entries[place] is None:
                entries[place] = _entry(task, specs, bar=bar) | {k: result[k] for k in ("commit", "dirty")}
            done = [entry for entry in entries if entry is not None]
            result["shapes"] = [entry for entry in done if "family" not in entry["task"]]
            result["growth"] = [entry for entry in done if "family" in entry["task"]]
            write_json(file, result)
    write_text(file.with_suffix(".svg"), bench_plot(result))
    return result


def _shape_task(plan: BenchPlan, shape: Shape) -> tuple[dict[str, Any], dict[str, SideSpec]]:
    """What tells the entry apart (all that its numbers depend on), and its two sides."""
    specs = {side: plan.spec(side, shape) for side in ("trl", "ours")}
    return specs["ours"].model_dump(mode="json", exclude={"side"}), specs


def _point_task(plan: BenchPlan, point: Point) -> tuple[dict[str, Any], dict[str, SideSpec]]:
    spec = plan.spec("ours", read_shape(point.shape), vocabulary=point.vocabulary)
    task = {"family": point.family, "factor": point.factor, **spec.model_dump(mode="json", exclude={"side"})}
    return task, {"ours": spec}


def finished_entries(file: Path, now: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Entries of an earlier bench.json that need not be measured again: nothing failed, same versions and machine."""
    try:
        then = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    if not isinstance(then, dict) or any(then.get(key) != now[key] for key in _SAME_PLACE):
        return []
    entries = [*then.get("shapes", []), *then.get("growth", [])]
    return [e for e in entries if not any(e[side]["failed"] for side in ("trl", "ours") if side in e)]


def _entry(task: dict[str, Any], specs: Mapping[str, SideSpec], *, bar: tqdm) -> dict[str, Any]:
    def told(side: str) -> None:
        bar.set_description(f"{task.get('family') or specs['ours'].shape.label} {side}")

    measured = measure(specs, told=told, done=bar.update)
    bare = {key: task[key] for key in ("family", "factor", "vocabulary") if task.get(key) is not None}
    entry = {"task": task, "shape": task["shape"], **bare, **measured}
    return entry | ({"ratios": ratios(measured["trl"], measured["ours"])} if "trl" in measured else {})


def measure(
    specs: Mapping[str, SideSpec], *, told: Callable[[str], Any], done: Callable[[], Any]
) -> dict[str, dict[str, Any]]:
    """Step the sides in turn: ``warm_up``, ``steps`` (the timed ones), ``peak_mib`` and ``failed`` of each.

    A side that got ready has also ``ready_mib``, its peak before the first step, and a hash of its ``prompts``.

    Args:
        specs: what to run, by name of the side.
        told: is called with the name before each step.
        done: is called after each.
    """
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in specs}
    failed: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        sides = {name: stack.enter_context(SideProcess(spec)) for name, spec in specs.items()}
        repeats = next(iter(specs.values())).repeats
        for turn, name in itertools.product(range(repeats + 2), sides):
            if name in failed:
                continue
            told(name)
            try:
                answers[name].append(sides[name].step() if turn else sides[name].answer())
            except SideError as error:
                failed[name] = str(error)
            if turn:
                done()
    return {name: _side_record(answers[name], failed.get(name)) for name in specs}


def _side_record(answers: Sequence[dict[str, Any]], failed: str | None) -> dict[str, Any]:
    greeting, warm_up, *steps = [*answers, *[None] * (2 - len(answers))]
    peaks = [step["peak_mib"] for step in (warm_up, *steps) if step]
    own = {"warm_up": warm_up, "steps": steps, "peak_mib": max(peaks, default=None), "failed": failed}
    return own | (greeting or {})


def ratios(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, dict[str, float] | None]:
    """TRL over ours: median, lowest and highest over pairs of steps; nothing where a side failed.

    A phase too short for the clock has None. Memory is one ratio, of the two peaks.
    """
    if theirs["failed"] or ours["failed"]:
        return {}
    found = {name: _spread(theirs["steps"], ours["steps"], key) for name, key in PHASES.items()}
    memory = theirs["peak_mib"] / ours["peak_mib"]
    return found | {"memory": {"median": memory, "low": memory, "high": memory}}


def _spread(theirs: Sequence[Mapping[str, float]], ours: Sequence[Mapping[str, float]], key: str) -> Any:  # noqa: ANN401
    if any(step[key] <= 0 for step in ours):
        return None
    pairs = [a[key] / b[key] for a, b in zip(theirs, ours, strict=True)]
    return {"median": statistics.median(pairs), "low": min(pairs), "high": max(pairs)}


def check_plan(plan: BenchPlan) -> None:
    """Raise a Refusal where the model or its tokenizer cannot take the plan's shapes; no weights are read."""
    if plan.model.name == DEMO_NAME:
        demo_weights()
        # Converting the weights takes memory that the sides would inherit as theirs: another process does it.
        subprocess.run([sys.executable, "-c", _CONVERT], check=True)
    from transformers import AutoConfig, AutoTokenizer

    source = str(demo_model_folder()) if plan.model.name == DEMO_NAME else plan.model.name
    try:
        room = getattr(AutoConfig.from_pretrained(source), "max_position_embeddings", None)
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise Refusal(f"cannot use the model {plan.model.name!r}: {str(error).splitlines()[0]}") from error
    own = [*plan.shapes, *(point.shape for point in plan.points if point.vocabulary is None)]
    for shape in map(read_shape, own):
        if room and shape.prompt + shape.completion > room:
            raise Refusal(f"shape {shape.text}: {plan.model.name!r} has room for {room} tokens; choose a shorter one")
        count = shape.prompts * (plan.repeats + SPARE_STEPS)
        exact_prompts(tokenizer, length=shape.prompt, count=count, seed=plan.seed)
