"""The page of the Fisher says what the numbers say."""

import json
import re

import pytest
from forklora.recipes.cli import main
from forklora.recipes.fisher_page import fisher_sheet
from forklora.recipes.sheet import sheet_html

from forklora.archive import load_tensors
from tiny_policy import LAYERS, guessing, llama, tokenizer

EASY = ("factored=1", "model.dtype=float32", "task.options={low: 0, high: 2, shots: 1}")


def test_the_command_writes_numbers_page_and_coordinates_that_agree(tmp_path, capsys):
    guessing(llama(tied=False)).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    out = tmp_path / "out"
    asked = ["fisher", str(tmp_path / "model"), "--task", "multiplication", "--output", str(out)]
    assert main([*asked, "count=12", "group=6", *EASY]) == 0
    said = capsys.readouterr().out
    result, page = json.loads((out / "fisher.json").read_text()), (out / "fisher.html").read_text()
    assert page == sheet_html(fisher_sheet(result)) and not re.search(r'(?:src|href)="(?!data:,|#)|<script', page)
    figures = result["figures"]
    for text in (said, page, (out / "fisher.md").read_text()):
        assert f"hold {figures['held_other']:.1%} of the top" in " ".join(text.split())
    tensors, facts = load_tensors(out / "top.safetensors", kind="fisher")
    assert len(tensors) == LAYERS and facts["share"] == "0.01"
    assert sum(len(index) for index in tensors.values()) == round(0.01 * figures["coordinates"])


@pytest.mark.parametrize("held", [None, 0.4])
def test_what_does_not_exist_is_said(held):
    figures = {"share": 0.01, "held_other": held, "held_same": held, "rollouts": 1, "coordinates": 1, "deviation": 0.0}
    figures |= dict.fromkeys(("fisher_kept", "gradient_kept", "numbers_that_hold_half_the_fisher"))
    subject = {"model": {"name": "m", "dtype": "float32"}, "task": {"name": "t"}, "count": 2, "group": 2, "seed": 0}
    sheet = fisher_sheet({"subject": subject, "figures": figures, "rows": [], "layers": [], "factored": []})
    assert ("no gradient" in sheet.lead) == (held is None)
    assert "—" in sheet_html(sheet)
