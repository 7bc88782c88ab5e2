"""The command `forklora`: arguments into calls of the rooms, what comes back into tables and an exit code.

    forklora list
    forklora run quickstart steps=5 arms.span.rate=0.1 --json run.json
    forklora run quickstart deepspeed=zero2 ranks=2
    forklora copy quickstart mine.yaml
    forklora capture mine.yaml
    forklora bench shapes=40/5/8 repeats=3
    forklora stages stages=0,3 ranks=2

Exit codes: 0 success, 1 something failed on the way, 2 bad input (one screen of text, before any long work),
130 interrupted. A room is imported by the verb that needs it, so that `list` does not wait for torch.
"""

import argparse
import importlib.metadata
import importlib.util
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forklora.recipes.files import write_json
from forklora.recipes.refusal import Refusal

if TYPE_CHECKING:
    from forklora.recipes.config import Recipe
    from rich.table import Table

_NEEDED = ("pydantic", "rich", "yaml")
_OVERRIDES = "changes to the recipe: steps=3, evaluation.prompts=32, arms.0.rate=1e-3, arms.span.rank=2"
_CHANGES = "changes to what is measured: shapes=40/5/8,64/64/8/4/32, repeats=3, growth=false, model.name=FOLDER"
_CELLS = "changes to which cells run: stages=none,3, ranks=2, kinds=span, optimizers=sgd,length, dtypes=float32"


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
            _check_writable(options.json.parent, f"for --json {options.json}")
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
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    run = _verb(verbs, "run", about="train every arm of a recipe, print one table, write records and a report")
    run.add_argument("--overwrite", action="store_true", help="replace the records of an earlier run in that folder")
    _verb(verbs, "capture", about="share of a held-out policy gradient that reward-free bases and random ones hold")
    bench = _verb(verbs, "bench", about="time and memory of a training step beside TRL's own, and how ours grows")
    bench.add_argument("--overwrite", action="store_true", help="measure again what that folder holds already")
    stages = _verb(verbs, "stages", about="the same update under every DeepSpeed stage: a matrix of tiny real runs")
    stages.add_argument("--overwrite", action="store_true", help="run again what that folder holds already")
    _verb(verbs, "list", about="the recipes that come with the package")
    _verb(verbs, "copy", about="copy a recipe or a DeepSpeed configuration (zero2, ...), to change it")
    options, rest = parser.parse_known_args(arguments)
    # argparse closes the list of overrides at the first option; what follows the option is still meant as one.
    strays = [word for word in rest if word.startswith("-") or "overrides" not in options]
    if strays:
        parser.error(f"unrecognized arguments: {' '.join(strays)}")
    if rest:
        options.overrides += rest
    return options


def _verb(verbs: Any, name: str, *, about: str) -> argparse.ArgumentParser:  # noqa: ANN401 - argparse keeps the type private
    """Adds a verb; the options of a recipe are described in the help of the verbs that take them."""
    changes = {"run": _OVERRIDES, "capture": _OVERRIDES, "bench": _CHANGES, "stages": _CELLS}.get(name)
    parser = verbs.add_parser(
        name,
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        epilog=_option_help(name) if changes else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if name not in ("list", "bench", "stages"):
        parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, or a name that `forklora list` shows")
    if changes:
        parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help=changes)
    if name == "copy":
        parser.add_argument("target", metavar="DEST", nargs="?", type=Path, help="file or folder; here if not given")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the result as JSON")
    calls = {"run": _run, "capture": _capture, "bench": _bench, "stages": _stages, "list": _list, "copy": _copy}
    parser.set_defaults(verb=calls[name])
    return parser


def _option_help(verb: str) -> str:
    from forklora.recipes.bench_plan import BenchPlan
    from forklora.recipes.config import Recipe
    from forklora.recipes.stages_plan import StagesPlan
    from forklora.recipes.wording import described_options

    known = {"bench": ("benchmark", BenchPlan), "stages": ("matrix", StagesPlan)}
    what, group = known.get(verb, ("recipe", Recipe))
    described = described_options(group)
    lines = [f"  {key} ({kind}; {default})\n      {about}" for key, kind, default, about in described]
    return "\n".join([f"options of a {what}, with their defaults:", *lines])


def _run(options: argparse.Namespace) -> tuple[int, Any]:
    recipe = _checked_recipe(options)
    from forklora.recipes.run import run_recipe

    records = run_recipe(recipe, overwrite=options.overwrite)
    from forklora.recipes.summary import summary_table

    page = Path(recipe.output) / "report.html"
    _show(_side_by_side(summary_table(records), title=f"{recipe.name}: {recipe.description}"))
    print(f"report: {page}")
    unfinished = [record for record in records if record["status"] != "done"]
    for record in unfinished:
        print(f"forklora: {record['arm']} {record['status']}: {record.get('error')}", file=sys.stderr)
    return (1 if unfinished else 0), {"records": records, "report": str(page)}


def _capture(options: argparse.Namespace) -> tuple[int, Any]:
    recipe = _checked_recipe(options)
    if recipe.deepspeed is not None or recipe.ranks > 1:
        raise Refusal("capture runs in one process: deepspeed and ranks are for `forklora run`")
    from forklora.recipes.capture import run_capture

    result = run_capture(recipe)
    _show(_table(result["rows"], title="share of a held-out policy gradient's energy inside the bases"))
    return 0, result


def _bench(options: argparse.Namespace) -> tuple[int, Any]:
    from forklora.recipes.bench_plan import load_plan

    plan = load_plan(options.overrides)
    _check_writable(Path(plan.output), "for the output; choose another folder with output=FOLDER")
    from forklora.recipes.bench import check_plan, run_bench
    from forklora.recipes.bench_table import CAPTION, failures, growth_rows, shape_rows

    check_plan(plan)
    result = run_bench(plan, overwrite=options.overwrite)
    _show(_table(shape_rows(result), title=f"one training step on {plan.model.name}: TRL's GRPO beside ours"))
    if result["growth"]:
        _show(_table(growth_rows(result), title="how our own step grows"))
    print(CAPTION)
    print(f"numbers: {Path(plan.output) / 'bench.json'}, plot: {Path(plan.output) / 'bench.svg'}")
    failed = failures(result)
    for line in failed:
        print(f"forklora: {line}", file=sys.stderr)
    return (1 if failed else 0), result


def _stages(options: argparse.Namespace) -> tuple[int, Any]:
    from forklora.recipes.stages_plan import load_stages

    plan = load_stages(options.overrides)
    _check_writable(Path(plan.output), "for the output; choose another folder with output=FOLDER")
    from forklora.recipes.stages import check_stages, run_stages
    from forklora.recipes.stages_table import CAPTION, failed_cells, stage_rows

    check_stages(plan)
    result = run_stages(plan, overwrite=options.overwrite)
    for dtype in plan.dtypes:
        _show(_table(stage_rows(result, dtype), title=f"base in {dtype}"))
    print(CAPTION)
    print(f"cells: {Path(plan.output) / 'stages.json'}")
    failed = list(failed_cells(result))
    for line in failed:
        print(f"forklora: {line}", file=sys.stderr)
    return (1 if failed else 0), result


def _list(_: argparse.Namespace) -> tuple[int, Any]:
    from forklora.recipes.config import Recipe, recipe_paths
    from forklora.recipes.reading import read_yaml

    recipes = {name: Recipe.model_validate(read_yaml(path)) for name, path in recipe_paths().items()}
    rows = [
        {
            "name": name,
            "task": recipe.task.name,
            "arms": ", ".join(arm.name for arm in recipe.arms),
            "description": recipe.description,
        }
        for name, recipe in recipes.items()
    ]
    _show(_table(rows, title="recipes"))
    return 0, rows


def _copy(options: argparse.Namespace) -> tuple[int, Any]:
    from forklora.recipes.config import find_recipe
    from forklora.recipes.zero import deepspeed_paths

    source = deepspeed_paths().get(options.recipe) or find_recipe(options.recipe)
    target = options.target or Path()
    target = target / source.name if target.is_dir() else target
    try:
        content = source.read_bytes()
        with target.open("xb") as copy:
            copy.write(content)
    except FileExistsError as error:
        raise Refusal(f"{target} exists already and is left as it is; name another file") from error
    except OSError as error:
        raise Refusal(f"cannot write {target}: {error.strerror}") from error
    use = f"forklora run {target}" if source.suffix != ".json" else f"forklora run RECIPE deepspeed={target}"
    print(f"{target}: change it, then `{use}`")
    return 0, {"recipe": str(source), "copy": str(target)}


def _checked_recipe(options: argparse.Namespace) -> "Recipe":
    """The recipe, after everything that can be found wrong in a second has been looked at."""
    from forklora.recipes.config import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)
    from forklora.recipes.demo import DEMO_NAME, demo_weights

    if recipe.model.name == DEMO_NAME:
        demo_weights()
    _check_writable(Path(recipe.output), "for the output; choose another folder with output=FOLDER")
    from forklora.recipes.preflight import check_recipe

    check_recipe(recipe)
    return recipe


def _check_writable(folder: Path, purpose: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise Refusal(f"cannot write to {folder} ({error.strerror}), {purpose}") from error


def _show(table: "Table") -> None:
    from rich.console import Console

    # A pipe has no width of its own; 120 columns keep the rows whole in logs.
    Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 120).print(table)


def _table(rows: Sequence[Mapping[str, Any]], *, title: str) -> "Table":
    """A table with one line per row; the first row's keys are the headings."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for heading, value in (rows[0] if rows else {}).items():
        table.add_column(heading, justify="left" if isinstance(value, str) else "right", overflow="fold")
    for row in rows:
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    return table


def _side_by_side(rows: Sequence[Mapping[str, str]], *, title: str) -> "Table":
    """A table with one column per row, for rows of many short entries; errors are left out where there are none."""
    from forklora.recipes.summary import MISSING

    headings, *others = rows[0]
    lines = [{headings: other, **{row[headings]: row[other] for row in rows}} for other in others]
    return _table([line for line in lines if {*line.values()} != {"error", MISSING}], title=title)
