"""Which cells `forklora stages` runs: the whole matrix, parts of it, references, refusals of one screen, the help."""

from collections import Counter

import pytest
from forklora.recipes.cli import main
from forklora.recipes.stages_plan import LIMITS, ROLLOUTS, StagesPlan, load_stages


def test_the_whole_matrix_has_every_combination_once_and_the_same_rollouts_everywhere():
    cells = StagesPlan().cells
    assert len(cells) == len({cell.name for cell in cells}) == 5 * 2 * 2 * 2 * 4 * 3 + 5 * 2 * 2
    assert {cell.rows * cell.ranks * cell.accumulation for cell in cells} == {ROLLOUTS}
    counts = Counter(cell.kind for cell in cells)
    assert counts == dict.fromkeys(("span", "core", "inputs", "block"), 120) | {"collected": 20}
    assert set(StagesPlan().needed) == set(cells)


def test_a_part_brings_the_references_it_is_held_against_in_front():
    plan = load_stages(["stages=0,3", "ranks=2", "kinds=span", "optimizers=sgd", "dtypes=float32", "accumulation=1"])
    assert [cell.name for cell in plan.cells] == ["zero0-2-float32-1-span-sgd", "zero3-2-float32-1-span-sgd"]
    assert [cell.name for cell in plan.needed] == ["none-1-float32-1-span-sgd", *(c.name for c in plan.cells)]
    alone = load_stages(["stages=1", "ranks=2", "kinds=collected", "dtypes=float32", "accumulation=4,1"])
    # ranks draw rollouts of their own for the bases: as many ranks, hence, but no DeepSpeed
    assert [cell.name for cell in alone.needed] == [
        "none-2-float32-1-collected-length", "zero1-2-float32-4-collected-length",
    ]  # fmt: skip
    assert load_stages(["stages=3", "ranks=[1, 2]", "accumulation=4,4"]).ranks == (1, 2)
    assert load_stages(["stages=3, none"]).stages == ("3", "none")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("stages=4", "none | 0 | 1 | 2 | 3"),
        ("stages=zero3", "none | 0 | 1 | 2 | 3"),
        ("stages=[]", "at least one entry"),
        ("dtypes=float16", "float32 | bfloat16"),
        ("ranks=0", "ranks"),
        ("ranks=two", "ranks"),
        ("ranks=3", "ranks=3 with accumulation=1 do not divide the 16 rollouts"),
        ("accumulation=32", "ranks=1 with accumulation=32 do not divide"),
        ("kinds=lora", "span | core | inputs | block | collected"),
        ("optimizers=adam", "sgd | adamw | length | kl"),
        ("processes=0", "processes = 0"),
        ("stage=3", "did you mean 'stages'?"),
        ("stages", "write key=value"),
    ],
)
def test_bad_input_is_refused_on_one_screen_before_anything_is_done(override, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["stages", override]) == 2
    spoken = capsys.readouterr()
    assert said in spoken.err and spoken.out == ""
    assert len(spoken.err.splitlines()) <= 24
    assert list(tmp_path.iterdir()) == []


def test_a_combination_that_does_not_exist_is_refused(capsys):
    assert main(["stages", "kinds=collected", "optimizers=sgd"]) == 2
    assert "nothing is left to run" in capsys.readouterr().err


def test_every_limit_says_why_it_is_what_it_is():
    assert all(len(limit.why) > 20 and limit.float32 <= limit.bfloat16 for limit in LIMITS.values())
    assert (LIMITS["outside"].float32, LIMITS["outside"].bfloat16) == (1e-6, 1e-3)


def test_the_help_explains_the_options(capsys):
    with pytest.raises(SystemExit):
        main(["stages", "--help"])
    said = capsys.readouterr().out
    for words in ("  stages (list of none | 0 | 1", "  kinds (list of span", "  processes (", "--overwrite"):
        assert words in said
