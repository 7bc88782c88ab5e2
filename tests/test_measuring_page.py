"""The page of a measurement says what the result says, and nothing that is not in it."""

import json
import re

import pytest
import torch
from forklora.recipes.cli import main
from forklora.recipes.measure_plan import MeasurePlan
from forklora.recipes.measuring_page import measuring_sheet
from forklora.recipes.sheet import sheet_html

from tiny_policy import eager, llama, tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    base, tuned = eager(llama(tied=False)), eager(llama(tied=False))
    with torch.no_grad():
        for name, p in tuned.named_parameters():
            if "layers.0" in name and p.ndim == 2:
                p += 0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    for name, model in (("base", base), ("tuned", tuned)):
        model.save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    return folder


def measured(folder, *more, tuned="tuned"):
    """What the command writes: exit code, numbers, Markdown, page."""
    out = folder / "out"
    code = main(["measure", str(folder / "base"), str(folder / tuned), "--output", str(out), *more])
    names = ("measure.json", "measure.md", "measure.html")
    return code, json.loads((out / names[0]).read_text()), (out / names[1]).read_text(), (out / names[2]).read_text()


def test_the_command_writes_numbers_markdown_and_page_that_agree(folder, capsys):
    code, result, markdown, page = measured(folder, "--task", "multiplication", "count=6", "top=2")
    assert code == 0
    said = capsys.readouterr().out
    whole = next(row for row in result["rows"] if row["weights"] == "all matrices")
    assert (whole["moved"], whole["count"]) == (7, 16)
    for text in (markdown, page, said):
        assert f"{whole['unchanged_bf16']:.3f}" in text and "7 of 16 matrices moved" in " ".join(text.split())
    shares = next(row for row in result["captured"] if row["layers"] == "all layers")
    assert f"{shares['output']['mean']:.3f}" in page
    assert "<script" not in page and not re.search(r'(?:src|href)="(?!data:,|#)', page)
    assert result["plan"]["task"]["name"] == "multiplication"
    assert {path.name for path in (folder / "out").iterdir()} == {"measure.json", "measure.md", "measure.html"}


def test_nothing_moved_is_said(folder):
    _, result, markdown, page = measured(folder, tuned="base")
    assert result["captured"] == []
    assert "Nothing moved" in markdown and "Nothing moved" in page and "<svg" not in page


def test_what_cannot_be_measured_is_refused_before_anything_is_rolled_out(folder, capsys, tmp_path):
    out = str(tmp_path / "out")
    assert main(["measure", str(folder / "base"), "nowhere", "--task", "multiplication", "--output", out]) == 2
    assert "is no folder" in capsys.readouterr().err
    assert main(["measure", str(folder / "base"), "x", "--trace", "none.safetensors"]) == 2
    assert "no file of rollouts" in capsys.readouterr().err


def test_every_figure_of_the_page_is_in_the_result(folder):
    _, result, _, _ = measured(folder, "top=2")
    plan = MeasurePlan.model_validate(result["plan"], strict=False).model_dump(mode="json")
    assert sheet_html(measuring_sheet(result | {"plan": plan})) == (folder / "out" / "measure.html").read_text()
