"""What a benchmark is asked to measure: shapes from their text, refusals of one screen, the help."""

import pytest
from forklora.recipes.bench_plan import GROWTH, SHAPES, BenchPlan, load_plan, read_shape
from forklora.recipes.cli import main


def test_a_shape_is_one_of_the_known_ones_or_made_from_its_numbers():
    assert tuple(read_shape(text).text for text in SHAPES) == SHAPES
    assert [read_shape(text).text for text in ("40/5/8", "40/40/2", " 512/32/8 ")] == [SHAPES[0], SHAPES[4], SHAPES[3]]
    assert read_shape("40/5/4").text == "40/5/4/4/16"
    assert read_shape("40/5/8/3").text == "40/5/8/3/24"
    # the rows are the most that divide the rollouts and keep a micro-batch at 6,000 tokens
    assert read_shape("500/500/6/2").text == "500/500/6/2/6"
    assert read_shape("9000/1/2").rows == 1
    made = read_shape("64/256/8/4/16")
    assert (made.accumulation, made.prompts * made.group) == (2, 32)
    for text in SHAPES:
        assert read_shape(text.rpartition("/")[0]).text == text


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("shapes=40/5", "'40/5' is no shape; write prompt/completion/group"),
        ("shapes=40/5/8/0", "is no shape"),
        ("shapes=40/5/x", "is no shape"),
        ("shapes=40/5/1", "groups of 1"),
        ("shapes=40/5/8/3/7", "24 rollouts in a step, which rows of 7 do not divide"),
        ("shapes=40/5/8,40/5/8/16/128", "more than once: 40/5/8/16/128"),
        ("shapes=[]", "at least one entry"),
        ("shapes=40", "shapes = 40: expected list of text"),
        ("repeats=0", "repeats = 0"),
        ("repets=1", "did you mean 'repeats'?"),
        ("growth=perhaps", "expected true | false"),
        ("model.dtype=int8", "bfloat16 | float16 | float32"),
        ("repeats", "write key=value"),
    ],
)
def test_bad_input_is_refused_on_one_screen_before_anything_is_done(override, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", override, "model.name=nowhere"]) == 2
    spoken = capsys.readouterr()
    assert said in spoken.err and spoken.out == ""
    assert len(spoken.err.splitlines()) <= 24
    assert list(tmp_path.iterdir()) == []


def test_overrides_reach_the_plan_and_nothing_else_changes():
    plan = load_plan(["shapes=40/5/8,64/64/8", "repeats=3", "growth=false", "model.name=folder"])
    assert plan.shapes == (SHAPES[0], SHAPES[1])
    assert (plan.repeats, plan.growth, plan.model.name, plan.model.dtype) == (3, False, "folder", "bfloat16")
    assert plan.points == () and BenchPlan().points == GROWTH and BenchPlan().shapes == SHAPES
    assert [(p.family, p.factor) for p in GROWTH[:6]] == [
        (f, n) for f in ("rollouts", "completion length") for n in (1, 2, 4)
    ]
    shapes = [read_shape(p.shape) for p in GROWTH]
    assert [s.prompts * s.group for s in shapes[:3]] == [64, 128, 256]
    assert [s.completion for s in shapes[3:6]] == [16, 32, 64] and {s.prompts for s in shapes[3:6]} == {8}
    assert [p.vocabulary for p in GROWTH[6:]] == [8_192, 32_768, 151_936]


def test_the_help_explains_the_options(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    said = capsys.readouterr().out
    for words in ("  shapes (list of text", "  model.name (", "  growth (true | false; True)", "--overwrite"):
        assert words in said
