"""Does what each verb of the command `forklora` is for: rooms are called, what comes back is shown.

Every verb takes the parsed options and returns the exit code with the result that `--json` writes. A room is imported
by the verb that needs it, so that `list` does not wait for torch.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forklora.recipes.files import check_writable
from forklora.recipes.refusal import Refusal
from forklora.recipes.terminal import show, side_by_side, table

_MOST_ARMS = 6  # that the list names

if TYPE_CHECKING:
    from forklora.recipes.config import Recipe


def run(options: argparse.Namespace) -> tuple[int, Any]:
    """Train every arm of a recipe."""
    recipe = checked_recipe(options)
    from forklora.recipes.run import run_recipe

    records = run_recipe(recipe, overwrite=options.overwrite)
    from forklora.recipes.summary import summary_table

    page = Path(recipe.output) / "report.html"
    show(side_by_side(summary_table(records), title=f"{recipe.name}: {recipe.description}"))
    print(f"report: {page}")
    unfinished = [record for record in records if record["status"] != "done"]
    for record in unfinished:
        print(f"forklora: {record['arm']} {record['status']}: {record.get('error')}", file=sys.stderr)
    return (1 if unfinished else 0), {"records": records, "report": str(page)}


def bench(options: argparse.Namespace) -> tuple[int, Any]:
    """A training step beside TRL's own."""
    from forklora.recipes.bench_plan import load_plan

    plan = load_plan(options.overrides)
    check_writable(Path(plan.output), "for the output; choose another folder with output=FOLDER")
    from forklora.recipes.bench import check_plan, run_bench
    from forklora.recipes.bench_table import CAPTION, failures, growth_rows, shape_rows

    check_plan(plan)
    result = run_bench(plan, overwrite=options.overwrite)
    show(table(shape_rows(result), title=f"one training step on {plan.model.name}: TRL's GRPO beside ours"))
    if result["growth"]:
        show(table(growth_rows(result), title="how our own step grows"))
    print(CAPTION)
    print(f"numbers: {Path(plan.output) / 'bench.json'}, plot: {Path(plan.output) / 'bench.svg'}")
    failed = failures(result)
    for line in failed:
        print(f"forklora: {line}", file=sys.stderr)
    return (1 if failed else 0), result


def stages(options: argparse.Namespace) -> tuple[int, Any]:
    """The same update under every DeepSpeed stage."""
    from forklora.recipes.stages_plan import load_stages

    plan = load_stages(options.overrides)
    check_writable(Path(plan.output), "for the output; choose another folder with output=FOLDER")
    from forklora.recipes.stages import check_stages, run_stages
    from forklora.recipes.stages_table import CAPTION, failed_cells, stage_rows

    check_stages(plan)
    result = run_stages(plan, overwrite=options.overwrite)
    for dtype in plan.dtypes:
        show(table(stage_rows(result, dtype), title=f"base in {dtype}"))
    print(CAPTION)
    print(f"cells: {Path(plan.output) / 'stages.json'}")
    failed = list(failed_cells(result))
    for line in failed:
        print(f"forklora: {line}", file=sys.stderr)
    return (1 if failed else 0), result


def compare(options: argparse.Namespace) -> tuple[int, Any]:
    """Run what is missing of a comparison and report it."""
    from forklora.recipes.grid import load_grid

    grid = load_grid(options.recipe, options.overrides)
    check_place(grid.model.name, grid.output)
    from forklora.recipes.compare import check_grid, run_grid

    check_grid(grid)
    return _told(run_grid(grid, overwrite=options.overwrite), Path(grid.output))


def report(options: argparse.Namespace) -> tuple[int, Any]:
    """Write the report of a comparison's records."""
    from forklora.recipes.comparison_report import write_comparison

    if options.peft:
        check_writable(options.peft, "for --peft; choose another folder")
    told = _told(write_comparison(options.folder), options.folder)
    if options.peft:
        from forklora.recipes.comparison import read_comparison
        from forklora.recipes.method_comparison import write_peft_records

        records = [run.record for run in read_comparison(options.folder).runs if run.record]
        print(f"in PEFT's schema: {write_peft_records(records, options.peft)} files in {options.peft}")
    return told


def _told(found: dict[str, Any], folder: Path) -> tuple[int, Any]:
    """Show a comparison's table and its failures."""
    from forklora.recipes.comparison_report import comparison_rows

    show(table(comparison_rows(found), title=found["title"]))
    print(f"report: {folder / 'report.html'}, {folder / 'report.md'}, {folder / 'report.json'}")
    for failure in found["failures"]:
        print(f"forklora: {failure}", file=sys.stderr)
    return (1 if found["failures"] else 0), found


def list_all(_: argparse.Namespace) -> tuple[int, Any]:
    """The recipes and comparisons that come with the package."""
    from forklora.recipes.config import Recipe, recipe_paths
    from forklora.recipes.grid import Grid, grid_paths
    from forklora.recipes.reading import read_yaml

    recipes = {name: Recipe.model_validate(read_yaml(path)) for name, path in recipe_paths().items()}
    grids = {name: Grid.model_validate(read_yaml(path)) for name, path in grid_paths().items()}
    rows = [_listed(recipe, recipe.task.name, verb="run") for recipe in recipes.values()]
    rows += [_listed(grid, ", ".join(task.name for task in grid.tasks), verb="compare") for grid in grids.values()]
    show(table(rows, title="recipes and comparisons"))
    return 0, rows


def _listed(found: Any, tasks: str, *, verb: str) -> dict[str, str]:  # noqa: ANN401 - a Recipe or a Grid
    arms = [arm.name for arm in found.arms]
    named = ", ".join(arms[:_MOST_ARMS]) + (f", and {len(arms) - _MOST_ARMS} more" if len(arms) > _MOST_ARMS else "")
    return {
        "name": found.name,
        "verb": verb,
        "task": tasks,
        "arms": named,
        "description": found.description,
    }


def copy(options: argparse.Namespace) -> tuple[int, Any]:
    """Copy a recipe, a comparison or a DeepSpeed configuration."""
    from forklora.recipes.config import find_recipe
    from forklora.recipes.grid import grid_paths
    from forklora.recipes.zero import deepspeed_paths

    shipped = deepspeed_paths() | grid_paths()
    source = shipped.get(options.recipe) or find_recipe(options.recipe)
    target = options.target or Path()
    target = target / source.name if target.is_dir() else target
    try:
        content = source.read_bytes()
        with target.open("xb") as file:
            file.write(content)
    except FileExistsError as error:
        raise Refusal(f"{target} exists already and is left as it is; name another file") from error
    except OSError as error:
        raise Refusal(f"cannot write {target}: {error.strerror}") from error
    verb = "compare" if options.recipe in grid_paths() else "run"
    use = f"forklora {verb} {target}" if source.suffix != ".json" else f"forklora run RECIPE deepspeed={target}"
    print(f"{target}: change it, then `{use}`")
    return 0, {"recipe": str(source), "copy": str(target)}


def checked_recipe(options: argparse.Namespace) -> "Recipe":
    """The recipe, after everything that can be found wrong in a second has been looked at."""
    from forklora.recipes.config import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)
    check_place(recipe.model.name, recipe.output)
    from forklora.recipes.preflight import check_recipe

    check_recipe(recipe)
    return recipe


def check_place(model: str, output: str) -> None:
    """Refuse a demo model whose weights are not installed, or an output folder that nothing can be written to."""
    from forklora.recipes.demo import DEMO_NAME, demo_weights

    if model == DEMO_NAME:
        demo_weights()
    check_writable(Path(output), "for the output; choose another folder with output=FOLDER")
