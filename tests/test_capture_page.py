"""The page of captured shares says what the numbers say, and the command writes both."""

import json
import re

from forklora.recipes.capture_page import capture_sheet
from forklora.recipes.cli import main
from forklora.recipes.sheet import sheet_html

from tiny_policy import guessing, llama, tokenizer


def test_the_command_writes_numbers_and_page_that_agree(tmp_path, capsys):
    guessing(llama(tied=False, heads=4, width=48)).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    out = tmp_path / "out"
    asked = ["capture", str(tmp_path / "model"), "--task", "multiplication", "--output", str(out), "group=12"]
    easy = ["task.options={low: 0, high: 2, shots: 1}", "forks.prompts=32", "evaluation.prompts=64", "prompts=8"]
    assert main([*asked, *easy, "model.dtype=float32"]) == 0
    said = capsys.readouterr().out
    result, page = json.loads((out / "capture.json").read_text()), (out / "capture.html").read_text()
    sheet = capture_sheet(result, model=str(tmp_path / "model"), task="multiplication")
    assert page == sheet_html(sheet) and not re.search(r'(?:src|href)="(?!data:,|#)|<script', page)
    ours = next(row for row in result["bases"] if row["basis"] == "carried span")
    for text in (page, (out / "capture.md").read_text(), said):
        assert f"{ours['out k=16']:.1%}" in text and f"{ours['in k=4']:.3f}" in text


def test_no_gradient_is_refused(tmp_path, capsys):
    guessing(llama(tied=False, heads=4, width=48)).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    asked = ["capture", str(tmp_path / "model"), "--task", "multiplication", "--output", str(tmp_path / "out")]
    assert main([*asked, "task.options={low: 50, high: 99}", "forks.prompts=32", "evaluation.prompts=2"]) == 2
    assert "differ in no group" in capsys.readouterr().err and not any((tmp_path / "out").iterdir())
