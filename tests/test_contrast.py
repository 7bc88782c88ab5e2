"""Three ways of training full weights run on a tiny model, are measured alike, and are not repeated."""

import json
from pathlib import Path

import pytest
import torch
from forklora.recipes import contrast
from forklora.recipes.contrast import run_contrast
from forklora.recipes.contrast_page import best_runs, contrast_sheet
from forklora.recipes.contrast_plan import ContrastPlan
from forklora.recipes.refusal import Refusal
from forklora.recipes.sheet import sheet_html, sheet_markdown

from tiny_policy import LAYERS, guessing, llama, tokenizer

pytestmark = pytest.mark.slow
RATES = {"rl-adamw": [1e-3, 1e-2], "rl-sgd": [0.1], "sft-adamw": [1e-2], "sft-sgd": [0.1], "distill-adamw": [1e-2]}


def plan_of(folder, **changes):
    model = folder / "model"
    if not model.exists():
        guessing(llama(tied=False)).save_pretrained(model)
        tokenizer().save_pretrained(model)
    content = {
        "model": {"name": str(model), "dtype": "float32"},
        "task": {"name": "multiplication", "options": {"low": 0, "high": 2, "shots": 1}},
        "evaluation": {"every": 10, "prompts": 4, "samples": 2}, "rates": RATES | {"distill-sgd": [0.1]},
        "prompts": 4, "group": 8, "steps": 2, "forks": 6, "top": 2, "output": str(folder / "run"),
    }  # fmt: skip
    return ContrastPlan.model_validate(content | changes, strict=False)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("contrast")
    state = torch.get_rng_state()
    plan = plan_of(folder)
    result = run_contrast(plan)
    torch.set_rng_state(state)
    return plan, result


def test_every_run_ends_with_its_figures(found):
    plan, result = found
    assert [run["run"] for run in result["runs"]] == [run.name for run in plan.runs]
    for run in result["runs"]:
        assert (run["status"], run["error"]) == ("done", None)
        assert 0 <= run["validation"] <= 1 and 0 <= run["test"] <= 1 and run["seconds"] > 0
        matrices = run["update"]["matrices"]
        assert len(matrices) == LAYERS and all(entry["norm"] > 0 for entry in matrices)
        assert run["update"]["vectors"] == []
        assert len(run["update"]["captured"]) > 1
        record = json.loads((Path(plan.output) / run["run"] / "record.json").read_text())
        assert {key: record[key] for key in run} == run
    starts = {run["start"] for run in result["runs"]}
    assert len(starts) == 1  # the same model, asked the same


def test_weights_are_kept_of_teachers_alone(found):
    plan, _ = found
    kept = {path.parent.name for path in Path(plan.output).glob("*/model")}
    assert kept == {"rl-adamw-0.001", "rl-adamw-0.01"}


def test_what_is_done_is_not_repeated_and_what_is_missing_is(found, monkeypatch):
    plan, result = found
    ran = []
    true = contrast._run

    def run(plan, run, **options):
        ran.append(run.name)
        return true(plan, run, **options)

    monkeypatch.setattr(contrast, "_run", run)
    assert run_contrast(plan) == result and ran == []
    (Path(plan.output) / "sft-sgd-0.1" / "record.json").unlink()
    again = run_contrast(plan)
    assert ran == ["sft-sgd-0.1"]
    norms = [found["runs"][-1]["update"]["rows"][0]["norm"] for found in (again, result)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_the_page_names_every_arm_at_its_best_rate(found):
    _, result = found
    sheet = contrast_sheet(result)
    arms = [run["arm"] for run in best_runs(result["runs"])]
    assert arms == ["rl-adamw", "rl-sgd", "distill-adamw", "distill-sgd", "sft-adamw", "sft-sgd"]
    page, markdown = sheet_html(sheet), sheet_markdown(sheet)
    assert all(arm in page and arm in markdown for arm in arms) and "<script" not in page
    chosen = next(run for run in best_runs(result["runs"]) if run["arm"] == "rl-adamw")
    assert chosen["validation"] == max(run["validation"] for run in result["runs"] if run["arm"] == "rl-adamw")


def test_a_run_that_diverges_is_a_row_and_without_a_teacher_nothing_is_distilled(tmp_path):
    with pytest.raises(Refusal, match="no teacher"):
        run_contrast(plan_of(tmp_path, rates={"rl-adamw": [1e30], "rl-sgd": [0.1], "distill-adamw": [0.1]}))
    record = json.loads(next((tmp_path / "run").glob("rl-adamw-*/record.json")).read_text())
    assert record["status"] == "failed" and "diverged" in record["error"]
