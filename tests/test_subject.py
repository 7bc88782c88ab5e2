"""A subject is refused before any weight is read, or holds the model, the prompts and the settings that were named."""

import json

import pytest
from forklora.recipes.refusal import Refusal
from forklora.recipes.subject import ForkSubject, Subject, load_subject, read_prompts


def written(folder, text, name="prompts.txt"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_lines_of_text_are_prompts_and_empty_ones_are_left_out(tmp_path):
    assert read_prompts(written(tmp_path, "eins\n\n  \nzwei ü\n")) == ["eins", "zwei ü"]


def test_json_lines_hold_text_or_messages(tmp_path):
    chat = [{"role": "user", "content": "one\ntwo"}]
    lines = "\n".join(json.dumps({"prompt": prompt}) for prompt in ("a\nb", chat))
    assert read_prompts(written(tmp_path, lines, "prompts.jsonl")) == ["a\nb", chat]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("p.txt", "\n \n", "holds no prompt"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": ', "line 2 .* is no JSON"),
        ("p.jsonl", '{"question": "a"}', "line 1 .* has no prompt"),
        ("p.jsonl", "[1]", "line 1 .* has no prompt"),
        ("p.jsonl", '{"prompt": []}', "has no prompt"),
        ("p.jsonl", '{"prompt": ["a"]}', "has no prompt"),
    ],
)
def test_a_file_that_holds_something_else_is_refused_by_line(tmp_path, name, text, says):
    with pytest.raises(Refusal, match=says):
        load_subject(Subject, "anything", overrides=[], prompts=str(written(tmp_path, text, name)))


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(Refusal, match="cannot read the prompts"):
        read_prompts(tmp_path / "nowhere.txt")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Refusal, match="cannot read the prompts"):
        read_prompts(tmp_path / "bytes.txt")


@pytest.mark.parametrize("given", [{}, {"task": "addition", "prompts": "both.txt"}])
def test_prompts_have_exactly_one_source(given):
    with pytest.raises(Refusal, match="from a task or from a file"):
        load_subject(Subject, "anything", overrides=[], **given)


def test_unknown_tasks_and_keys_are_refused_with_what_is_near():
    with pytest.raises(Refusal, match="addition"):
        load_subject(Subject, "anything", overrides=[], task="adition")
    with pytest.raises(Refusal, match="did you mean 'count'"):
        load_subject(Subject, "anything", overrides=["counts=3"], task="addition")


def test_overrides_reach_every_group():
    found = load_subject(
        Subject, "m", overrides=["count=3", "sampling.top_p=0.9", "task.options={low: 7}"], task="addition"
    )
    assert (found.count, found.sampling.top_p, found.task.options) == (3, 0.9, {"low": 7})


def test_what_makes_a_candidate_is_checked():
    with pytest.raises(Refusal, match="mass"):
        load_subject(ForkSubject, "anything", overrides=["mass=1.5"], task="addition")
    assert load_subject(ForkSubject, "m", overrides=["mass=0.9", "cap=3"], task="addition").cap == 3
