"""Does what the verbs that look at models are for: they train nothing of yours, and write numbers and a page.

Every verb takes the parsed options and returns the exit code with the result that `--json` writes.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forklora.recipes.files import check_writable, write_json, write_text
from forklora.recipes.refusal import Refusal
from forklora.recipes.terminal import show, shown_table
from forklora.recipes.verbs import check_place, checked_recipe

if TYPE_CHECKING:
    from forklora.recipes.config import Recipe
    from forklora.recipes.sheet import Sheet

_PURPOSE = "for the output; choose another folder with --output FOLDER"


def capture(options: argparse.Namespace) -> tuple[int, Any]:
    """Shares of a held-out policy gradient that bases hold."""
    recipe = _task_recipe(options) if options.task else checked_recipe(options)
    if recipe.deepspeed is not None or recipe.ranks > 1:
        raise Refusal("capture runs in one process: deepspeed and ranks are for `forklora run`")
    folder = _folder(options)
    from forklora.recipes.capture import run_capture
    from forklora.recipes.capture_page import capture_sheet

    result = run_capture(recipe)
    sheet = capture_sheet(result, model=recipe.model.name, task=recipe.task.name)
    return _shown(sheet, result, folder=folder, name="capture")


def _task_recipe(options: argparse.Namespace) -> "Recipe":
    """A recipe of the named model and task, for what is measured without training an arm."""
    from forklora.recipes.config import Recipe, resolved
    from forklora.recipes.reading import checked_options

    data = {
        "name": options.task,
        "description": "Measured, not trained.",
        "model": {"name": options.recipe},
        "task": {"name": options.task},
        "arms": [{"name": "block", "adapter": "block", "rank": 1, "rate": 0.1}],
    }
    problem = "this cannot be measured"
    recipe = checked_options(Recipe, data, overrides=options.overrides, problem=problem, finish=resolved)
    check_place(recipe.model.name, recipe.output)
    return recipe


def _folder(options: argparse.Namespace) -> Path:
    """The output folder, once it is known that it can be written to."""
    folder = options.output or Path("runs") / options.verb.__name__
    check_writable(folder, _PURPOSE)
    return folder


def measure(options: argparse.Namespace) -> tuple[int, Any]:
    """What an update has done to the weights."""
    from forklora.recipes.measure_plan import load_measure

    trace = None if options.trace is None else str(options.trace)
    plan = load_measure(options.base, options.tuned, task=options.task, trace=trace, overrides=options.overrides)
    folder = _folder(options)
    from forklora.recipes.measuring import measure_update
    from forklora.recipes.measuring_page import measuring_sheet
    from forklora.recipes.pairs import WeightPairs
    from forklora.recipes.spans import read_spans

    pairs = WeightPairs(plan.base, plan.tuned)  # refused before anything is rolled out
    result = measure_update(pairs, top=plan.top, exact=plan.exact, seed=plan.seed, spans=read_spans(plan))
    result = {"plan": plan.model_dump(mode="json"), **result}
    return _shown(measuring_sheet(result), result, folder=folder, name="measure")


def forks(options: argparse.Namespace) -> tuple[int, Any]:
    """Where a model could have gone another way."""
    from forklora.recipes.subject import ForkSubject, load_subject

    prompts = None if options.prompts is None else str(options.prompts)
    given = {"task": options.task, "prompts": prompts, "overrides": options.overrides}
    subject = load_subject(ForkSubject, options.model, **given)
    folder = _folder(options)
    check_place(subject.model.name, str(folder))
    from forklora.recipes.forking import run_forks
    from forklora.recipes.forking_page import forking_sheet, terminal_map

    result, trace = run_forks(subject)
    trace.save(folder / "trace.safetensors")
    show(terminal_map(result["rows"]))
    return _shown(forking_sheet(result), result, folder=folder, name="forks")


def fisher(options: argparse.Namespace) -> tuple[int, Any]:
    """Where a policy could learn, and how far that caps what rewards ask for."""
    from forklora.recipes.subject import FisherSubject, load_subject

    subject = load_subject(FisherSubject, options.model, task=options.task, overrides=options.overrides)
    folder = _folder(options)
    check_place(subject.model.name, str(folder))
    from forklora.recipes.fisher_page import fisher_sheet
    from forklora.recipes.fisher_run import run_fisher

    from forklora.archive import save_tensors

    result, largest = run_fisher(subject)
    facts = {"model": subject.model.name, "task": options.task, "share": str(subject.share)}
    save_tensors(folder / "top.safetensors", largest, kind="fisher", facts=facts)
    return _shown(fisher_sheet(result), result, folder=folder, name="fisher")


def _shown(sheet: "Sheet", result: dict[str, Any], *, folder: Path, name: str) -> tuple[int, Any]:
    """Write numbers, Markdown and page, and show the tables that stand open."""
    from forklora.recipes.sheet import sheet_html, sheet_markdown

    write_json(folder / f"{name}.json", result)
    write_text(folder / f"{name}.md", sheet_markdown(sheet))
    write_text(folder / f"{name}.html", sheet_html(sheet))
    for one in (one for one in sheet.tables if not one.folded):
        show(shown_table(one))
    show(sheet.lead)
    show(f"page: {folder / name}.html, numbers: {folder / name}.json")
    return 0, result


def contrast(options: argparse.Namespace) -> tuple[int, Any]:
    """Several ways of training full weights, and what each did to them."""
    from forklora.recipes.contrast_plan import load_contrast

    plan = load_contrast(options.overrides)
    folder = Path(plan.output)
    check_place(plan.model.name, plan.output)
    from forklora.recipes.contrast import run_contrast
    from forklora.recipes.contrast_page import contrast_sheet

    result = run_contrast(plan, overwrite=options.overwrite)
    code, _ = _shown(contrast_sheet(result), result, folder=folder, name="contrast")
    failed = [run["run"] for run in result["runs"] if run["status"] != "done"]
    return (1 if failed else code), result
