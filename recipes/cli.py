"""The command `forklora`: arguments into calls of the rooms, what comes back into tables and an exit code.

    forklora list
    forklora run quickstart steps=5 arms.span.rate=0.1 --json run.json
    forklora run quickstart deepspeed=zero2 ranks=2
    forklora copy quickstart mine.yaml
    forklora compare quick seeds='[0, 1]'
    forklora report runs/quick
    forklora measure smollm2-135m ADAPTER --task addition
    forklora forks smollm2-135m --task addition count=16
    forklora fisher smollm2-135m --task addition
    forklora capture smollm2-135m --task addition
    forklora contrast steps=8
    forklora bench shapes=40/5/8 repeats=3
    forklora stages stages=0,3 ranks=2

Exit codes: 0 success, 1 something failed on the way, 2 bad input (one screen of text, before any long work),
130 interrupted. A room is imported by the verb that needs it, so that `list` does not wait for torch.
"""

import argparse
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forklora.recipes import looking, verbs
from forklora.recipes.files import check_writable, write_json
from forklora.recipes.refusal import Refusal

_NEEDED = ("pydantic", "rich", "yaml")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code; an unexpected fault leaves as a traceback, with exit code 1."""
    try:
        if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
            raise Refusal(
                f"the command needs packages that the library alone does not ({', '.join(missing)}); "
                'pip install "forklora[demo]"'
            )
        options = _parsed(arguments)
        if options.json:
            check_writable(options.json.parent, f"for --json {options.json}")
        code, result = options.verb(options)
        if options.json:
            write_json(options.json, result)
        return code
    except Refusal as refusal:
        print(f"forklora: {refusal}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("forklora: interrupted", file=sys.stderr)
        return 130


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="forklora", description="Fork-aligned low-rank adapters: run the recipes.")
    parser.add_argument("--version", action="version", version=importlib.metadata.version("forklora"))
    names = parser.add_subparsers(required=True, metavar="VERB")
    for name, verb in _VERBS.items():
        _add(names, name, verb)
    options, rest = parser.parse_known_args(arguments)
    # argparse closes the list of overrides at the first option; what follows the option is still meant as one.
    strays = [word for word in rest if word.startswith("-") or "overrides" not in options]
    if strays:
        parser.error(f"unrecognized arguments: {' '.join(strays)}")
    if rest:
        options.overrides += rest
    return options


@dataclass(frozen=True)
class _Verb:
    """A verb's call, what it does in a sentence, and what it takes.

    Attributes:
        call: of the verb.
        about: what it does.
        takes: names of what stands without a key, each with its help; one that ends in ``?`` may be left out.
        options: key, what stands behind it (a FILE and a FOLDER are paths), help.
        overrides: help of the ``key=value`` that it takes; None where it takes none.
        overwrite: help of ``--overwrite``; None where there is nothing to write over.
    """

    call: Callable[[argparse.Namespace], tuple[int, Any]]
    about: str
    takes: tuple[tuple[str, str], ...] = ()
    options: tuple[tuple[str, str, str], ...] = ()
    overrides: str | None = None
    overwrite: str | None = None


_RECIPE = ("recipe", "a YAML file, or a name that `forklora list` shows")
_PATHS = ("folder", "target")
_SPELLED = {"target": "DEST"}
_TASK = ("--task", "NAME", "prompts and rewards of this task, such as addition")
_OUTPUT = ("--output", "FOLDER", "where the numbers and the page go")
_PROMPTS = ("--prompts", "FILE", "prompts of a file, one in each line, or JSON lines with a key `prompt`")
_REPEAT = "measure again what that folder holds already"
_VERBS = {
    "run": _Verb(
        verbs.run,
        "train every arm of a recipe, print one table, write records and a report",
        (_RECIPE,),
        overrides="changes to the recipe: steps=3, evaluation.prompts=32, arms.0.rate=1e-3, arms.span.rank=2",
        overwrite="replace the records of an earlier run in that folder",
    ),
    "compare": _Verb(
        verbs.compare,
        "choose a rate for every arm, run them over seeds, report what differs; goes on where it stopped",
        (("recipe", "a YAML file, or a comparison that `forklora list` shows"),),
        overrides="changes to the comparison: seeds='[0, 1]', deepspeed=zero2, arms.span.rates='[0.03, 0.1]'",
        overwrite="forget the records of an earlier comparison in that folder",
    ),
    "report": _Verb(
        verbs.report,
        "tables, plots and one page from the records of a comparison",
        (("folder", "the folder that a comparison has written to"),),
        (("--peft", "FOLDER", "also write each run in PEFT's own schema there"),),
    ),
    "measure": _Verb(
        looking.measure,
        "what an update has done to a model's weights: rank, energy, overlap, share of unchanged weights",
        (
            ("base", "the model before: a folder, a hub id, or smollm2-135m"),
            ("tuned", "the model after, or a folder with a PEFT adapter of the base"),
        ),
        (
            ("--task", "NAME", "also the overlap with the span of this task's forks, beside random directions"),
            ("--trace", "FILE", "the same, with the forks of rollouts that `forklora forks` has written"),
            _OUTPUT,
        ),
        overrides="changes to what is measured: top=16, exact=2048, count=32",
    ),
    "forks": _Verb(
        looking.forks,
        "where a model could have gone another way: a map of its rollouts' forks, their candidates and their span",
        (("model", "a folder, a hub id, or smollm2-135m"),),
        (_TASK, _PROMPTS, _OUTPUT),
        overrides="changes to what is looked at: count=16, group=8, mass=0.95, sampling.temperature=0.7",
    ),
    "fisher": _Verb(
        looking.fisher,
        "a policy's Fisher, coordinate by coordinate, beside the gradient of rewards that it caps",
        (("model", "a folder, a hub id, or smollm2-135m"),),
        (_TASK, _OUTPUT),
        overrides="changes to what is summed up: count=32, group=8, share=0.001, factored=4",
    ),
    "capture": _Verb(
        looking.capture,
        "share of a held-out policy gradient that reward-free bases and others hold, and which layers hold it",
        (("recipe", "a YAML file, or a name that `forklora list` shows; with --task, a model"),),
        (_TASK, _OUTPUT),
        overrides="changes to the recipe: forks.prompts=32, evaluation.prompts=64",
    ),
    "contrast": _Verb(
        looking.contrast,
        "full weights trained by reinforcement learning, distillation and fine-tuning: what each did to them",
        overrides="changes to what is contrasted: steps=8, ways=rl,sft, rates.rl-sgd='[0.1, 0.3]', output=FOLDER",
        overwrite=_REPEAT,
    ),
    "bench": _Verb(
        verbs.bench,
        "time and memory of a training step beside TRL's own, and how ours grows",
        overrides="changes to what is measured: shapes=40/5/8,64/64/8/4/32, repeats=3, growth=false, model.name=FOLDER",
        overwrite=_REPEAT,
    ),
    "stages": _Verb(
        verbs.stages,
        "the same update under every DeepSpeed stage: a matrix of tiny real runs",
        overrides="changes to which cells run: stages=none,3, ranks=2, kinds=span, optimizers=length, dtypes=float32",
        overwrite=_REPEAT,
    ),
    "list": _Verb(verbs.list_all, "the recipes and comparisons that come with the package"),
    "copy": _Verb(
        verbs.copy,
        "copy a recipe, a comparison or a DeepSpeed configuration (zero2, ...), to change it",
        (
            ("recipe", "a name that `forklora list` shows, or a file"),
            ("target?", "file or folder; here if not given"),
        ),
    ),
}


def _add(names: Any, name: str, verb: _Verb) -> None:  # noqa: ANN401 - argparse keeps the type private
    """Adds a verb; the options it can change are described in its help."""
    parser = names.add_parser(
        name,
        help=verb.about,
        description=f"{verb.about[0].upper()}{verb.about[1:]}.",
        epilog=_option_help(name) if verb.overrides else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for what, about in verb.takes:
        word = what.removesuffix("?")
        left_out = {"nargs": "?"} if what.endswith("?") else {}
        kind = Path if word in _PATHS else str
        parser.add_argument(word, metavar=_SPELLED.get(word, word.upper()), type=kind, help=about, **left_out)
    for key, behind, about in verb.options:
        parser.add_argument(key, metavar=behind, type=Path if behind in ("FILE", "FOLDER") else str, help=about)
    if verb.overrides:
        parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help=verb.overrides)
    if verb.overwrite:
        parser.add_argument("--overwrite", action="store_true", help=verb.overwrite)
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the result as JSON")
    parser.set_defaults(verb=verb.call)


def _option_help(verb: str) -> str:
    from forklora.recipes.bench_plan import BenchPlan
    from forklora.recipes.config import Recipe
    from forklora.recipes.contrast_plan import ContrastPlan
    from forklora.recipes.grid import Grid
    from forklora.recipes.measure_plan import MeasurePlan
    from forklora.recipes.stages_plan import StagesPlan
    from forklora.recipes.subject import FisherSubject, ForkSubject
    from forklora.recipes.wording import described_options

    known = {
        "bench": ("benchmark", BenchPlan),
        "stages": ("matrix", StagesPlan),
        "compare": ("comparison", Grid),
        "contrast": ("contrast", ContrastPlan),
        "forks": ("look at the forks", ForkSubject),
        "fisher": ("sum of the Fisher", FisherSubject),
        "measure": ("measurement", MeasurePlan),
    }
    what, group = known.get(verb, ("recipe", Recipe))
    described = described_options(group)
    lines = [f"  {key} ({kind}; {default})\n      {about}" for key, kind, default, about in described]
    return "\n".join([f"options of a {what}, with their defaults:", *lines])
