"""The page of the forks says what the numbers say, stays small, and the terminal shows the same rollouts."""

import json
import random
import re

import pytest
from forklora.recipes.cli import main
from forklora.recipes.forking import _MAPPED, _MAPPED_TOKENS
from forklora.recipes.forking_page import forking_sheet, terminal_map
from forklora.recipes.sheet import sheet_html

from forklora.trace import Trace
from tiny_policy import eager, llama, tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forks") / "model"
    eager(llama(tied=False)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def test_the_command_writes_numbers_page_and_rollouts_that_agree(model, tmp_path, capsys):
    out = tmp_path / "out"
    asked = ["forks", str(model), "--task", "multiplication", "--output", str(out), "count=3", "group=2"]
    assert main([*asked, "sampling.stop=[]", "--json", str(tmp_path / "own.json")]) == 0
    said = capsys.readouterr().out
    result, page = json.loads((out / "forks.json").read_text()), (out / "forks.html").read_text()
    assert json.loads((tmp_path / "own.json").read_text()) == result
    assert page == sheet_html(forking_sheet(result))
    figures = result["figures"]
    for text in (said, page, (out / "forks.md").read_text()):
        assert f"{figures['forks']:,} of {figures['positions']:,} drawn tokens" in " ".join(text.split())
    assert page.count('class="rollout"') == 6 and not re.search(r'(?:src|href)="(?!data:,|#)|<script', page)
    trace = Trace.load(out / "trace.safetensors")
    assert len(trace) == 6 and trace.delta is not None
    assert {path.name for path in out.iterdir()} == {"forks.json", "forks.md", "forks.html", "trace.safetensors"}
    # what it writes can be measured with
    assert main(["measure", str(model), str(model), "--trace", str(out / "trace.safetensors"), "top=2"]) in (0, 2)


@pytest.mark.parametrize("given", [[], ["--task", "multiplication", "--prompts", "x.txt"], ["--prompts", "x.txt"]])
def test_prompts_have_one_source_that_can_be_read(model, tmp_path, capsys, given):
    assert main(["forks", str(model), "--output", str(tmp_path / "out"), *given]) == 2
    assert "prompts" in capsys.readouterr().err and not (tmp_path / "out").exists()


def invented(rows, length):
    """Rows with four candidates at every token, as wide as the map keeps them."""
    draw = random.Random(0)
    token = {
        "text": " wordy", "probability": 0.123, "spread": 0.456,
        "candidates": [[f" word{i}", round(draw.random(), 3)] for i in range(4)],
    }  # fmt: skip
    return [{"prompt": "q" * 300, "reward": 1.0, "tokens": [token] * length} for _ in range(rows)]


def result_of(rows):
    """The result of a look that found these rows."""
    figures = dict.fromkeys(("rollouts", "prompts", "positions", "forks", "distinct_forks"), 200)
    figures |= dict.fromkeys(("mean_candidates", "mean_leak", "leak_at_forks", "mean_spread", "spread_at_forks"), 0.5)
    subject = {"model": {"name": "m", "dtype": "float32"}, "task": None, "prompts": "p.txt", "group": 4, "seed": 0}
    return {
        "subject": subject | {"mass": 0.98, "cap": 8}, "figures": figures | {"mean_reward": None, "top_tenth": 0.5},
        "span": None, "frequent": [], "spectrum": [], "bounds": None, "rows": rows,
    }  # fmt: skip


def test_the_largest_map_stays_under_five_megabytes():
    page = sheet_html(forking_sheet(result_of(invented(_MAPPED, _MAPPED_TOKENS // _MAPPED))))
    assert page.count('class="rollout"') == 200 and len(page.encode()) < 5e6


def test_no_fork_is_said():
    result = result_of([])
    result["figures"] |= {"forks": 0, "spread_at_forks": None}
    assert "No fork in 200 drawn tokens" in forking_sheet(result).lead


def test_the_map_in_a_terminal_has_a_bar_above_each_token():
    tokens = [{"text": text, "spread": spread} for text, spread in (("ab", 8.0), ("c\n", 0.0), ("d", 4.0))]
    assert terminal_map([{"tokens": tokens}]) == "█     ▄\nab c⏎ d \n"
    wrapped = terminal_map([{"tokens": tokens * 20}], line=30).split("\n")
    assert all(len(line) <= 30 for line in wrapped) and sum(line.count("█") for line in wrapped) == 20
    assert terminal_map([]) == ""
