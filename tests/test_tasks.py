"""Tasks: every answer is right, the splits do not touch, the same seed gives the same question in any process."""

import os
import random
import re
import subprocess
import sys
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
import torch
from forklora.recipes.config import load_recipe, recipe_paths
from forklora.recipes.requests import TOOLS
from forklora.recipes.tasks import TaskError, score_first_line, split_of, task, task_names

SPLITS = ("train", "validation", "test")
CHAIN, WORDS = r"problem: ([-+ 0-9]+) =", r"list of words: (.*)\n"
SHIPPED = {name: load_recipe(name).task for name in recipe_paths()}


@pytest.fixture(params=SHIPPED)
def shipped(request):
    """The task of each shipped recipe."""
    return SHIPPED[request.param].build()


def test_splits_share_no_prompt(shipped):
    prompts = {
        split: {e.prompt for seed in (0, 1) for e in shipped.examples(200, seed=seed, split=split)} for split in SPLITS
    }
    assert all(len(found) > 300 for found in prompts.values())
    assert not any(prompts[a] & prompts[b] for a, b in combinations(SPLITS, 2))


def test_an_example_depends_on_seed_and_split_alone(shipped):
    before = (random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist())
    first = shipped.examples(6, seed=3, split="test")
    random.seed(7)
    shipped.examples(5, seed=9, split="train")
    assert shipped.examples(6, seed=3, split="test") == first
    random.setstate(before[0])
    assert shipped.examples(2, seed=3, split="test") == first[:2]
    assert shipped.examples(6, seed=4, split="test") != first
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert np.random.get_state()[1].tolist() == before[2]


def test_another_process_draws_the_same():
    """Whatever hashing of strings that process was started with."""
    code = """if True:
        from forklora.recipes.config import load_recipe, recipe_paths
        tasks = [load_recipe(name).task.build() for name in recipe_paths()]
        print([task.examples(3, seed=1, split="test") for task in tasks])"""
    expected = str([spec.build().examples(3, seed=1, split="test") for spec in SHIPPED.values()])
    for hashing in "01":
        environment = os.environ | {"PYTHONHASHSEED": hashing}
        said = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
        assert said.splitlines()[-1] == expected


def test_only_the_answer_on_a_finished_line_is_paid(shipped):
    for example in shipped.examples(50, seed=0, split="validation"):
        assert example.answer and "\n" not in example.answer
        assert shipped.score(f" {example.answer}\n", example.answer) == 1.0
        assert shipped.score(f" {example.answer}", example.answer) == 0.0
        assert shipped.score(f" {example.answer}0\n", example.answer) == 0.0
        # One token for each character is the most an answer takes, and the space before it and the newline one each.
        assert len(example.answer) + 2 <= shipped.max_new_tokens or shipped.name != "multiplication"


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (" 12\n", 1.0),
        ("12\n", 1.0),
        ("  12  \n", 1.0),
        ("12\n13\n", 1.0),
        ("12", 0.0),
        (" 120\n", 0.0),
        (" 1 2\n", 0.0),
        ("\n12\n", 0.0),
        (" 12.\n", 0.0),
        ("so: 12\n", 0.0),
        ("", 0.0),
    ],
)
def test_scores_by_example(completion, reward):
    assert score_first_line(completion, "12") == reward


@pytest.mark.parametrize(("name", "sign", "low", "high"), [("multiplication", "*", 2, 12), ("addition", "+", 5, 30)])
def test_arithmetic_is_right_and_covers_its_range(name, sign, low, high):
    seen = Counter()
    for example in task(name).examples(400, seed=0, split="train"):
        lines = (example.prompt + f" {example.answer}").split("\n")
        assert len(lines) == 4
        for line in lines:
            a, op, b, _, c = line.split(" ")
            assert op == sign
            assert int(c) == (int(a) * int(b) if sign == "*" else int(a) + int(b))
            seen[int(a)] += 1
            seen[int(b)] += 1
    assert set(seen) == set(range(low, high + 1))
    expected = 2 * 4 * 400 / (high - low + 1)
    assert all(abs(count - expected) < 6 * expected**0.5 for count in seen.values())


def test_chain_sums_are_right_and_word_reversals_reverse():
    for example in SHIPPED["chain_sum"].build().examples(100, seed=0, split="test"):
        *_, open_ = re.findall(CHAIN, example.prompt)
        assert sum(int(part.replace(" ", "")) for part in re.findall(r"[-+]?\s*\d+", open_)) == int(example.answer)
    for example in SHIPPED["word_reversal"].build().examples(100, seed=0, split="test"):
        *_, words = re.findall(WORDS, example.prompt)
        assert words.strip().split(", ")[::-1] == example.answer.split(", ")


def requests(prompt):
    """The offered names and the requests of a prompt, the last one open."""
    return re.findall(r"Tools: (.*)\nRequest: (.*)\nTool:", prompt)


def made_by(request):
    """Every (tool, pattern, filler) that makes a request, by trying them all."""
    return [
        (tool, p, f)
        for tool, (patterns, fillers) in TOOLS.items()
        for p, pattern in enumerate(patterns)
        for f, filler in enumerate(fillers)
        if pattern.format(filler) == request
    ]


def test_every_request_has_one_right_tool_and_the_prompt_offers_it():
    chosen = task("tool_choice")
    parts = {"train": range(0, 4), "validation": range(4, 6), "test": range(6, 8)}
    for split in SPLITS:
        for example in chosen.examples(60, seed=0, split=split):
            found = requests(example.prompt)
            assert len(found) == 4 and len(set(found[0][0].split(", "))) == 4
            for offered, request in found:
                ((tool, pattern, filler),) = made_by(request)
                assert tool in offered.split(", ")
            assert tool == example.answer
            assert pattern in parts[split] and filler in parts[split]
            solved = [made_by(request)[0] for _, request in found[:-1]]
            assert all(p in parts["train"] and f in parts["train"] for _, p, f in solved)


def test_tools_share_neither_patterns_nor_fillers():
    patterns, fillers = ([part for tool in TOOLS.values() for part in tool[i]] for i in (0, 1))
    assert len(patterns) == len({*patterns}) == len(fillers) == len({*fillers}) == 8 * len(TOOLS)
    assert all(pattern.count("{}") == 1 for pattern in patterns)


@pytest.mark.parametrize(("name", "question"), [("chain_sum", CHAIN), ("word_reversal", WORDS)])
def test_no_held_out_question_of_reasoning_gym_stands_in_a_training_prompt(name, question):
    chosen = SHIPPED[name].build()
    prompts = {split: [e.prompt for e in chosen.examples(400, seed=0, split=split)] for split in SPLITS}
    in_training = {found for prompt in prompts["train"] for found in re.findall(question, prompt)}
    for split in ("validation", "test"):
        asked = [re.findall(question, prompt) for prompt in prompts[split]]
        assert all(len(found) == 4 for found in asked)
        assert not {found[-1] for found in asked} & in_training
        # What is shown solved comes from training, so it may well be met there.
        assert {shown for found in asked for shown in found[:-1]} & in_training


def test_the_hash_splits_in_the_stated_shares():
    counts = Counter(split_of(str(i)) for i in range(20_000))
    for split, share in zip(SPLITS, (0.8, 0.1, 0.1), strict=True):
        assert abs(counts[split] / 20_000 - share) < 0.01


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("multiplicatoin", {}, "did you mean 'multiplication'"),
        ("addition", {"hihg": 3}, "did you mean 'high'"),
        ("addition", {"low": "x"}, "low: Input should be a valid integer"),
        ("addition", {"low": 5, "high": 5}, "low < high"),
        ("addition", {"low": 1, "high": 2, "shots": 0}, "too few different questions"),
        ("tool_choice", {"tools": 1}, "2 <= tools <= 8"),
        ("reasoning_gym", {}, "dataset"),
        ("reasoning_gym", {"dataset": "chain_sums"}, "did you mean 'chain_sum'"),
        ("reasoning_gym", {"dataset": "chain_sum", "settings": {"min_termz": 2}}, "min_termz"),
        ("reasoning_gym", {"dataset": "chain_sum", "settings": {"min_terms": 9, "max_terms": 2}}, "do not fit"),
        ("reasoning_gym", {"dataset": "chain_sum", "form": "Q:"}, "lacks the place"),
    ],
)
def test_a_task_that_cannot_be_is_refused_by_name(name, options, says):
    with pytest.raises(TaskError, match=re.escape(says)):
        task(name, **options).examples(40, seed=0, split="test")


def test_an_unknown_split_is_refused():
    with pytest.raises(TaskError, match="train, validation, test"):
        task("addition").question(0, "dev")


def test_every_named_task_is_in_some_recipe():
    assert set(task_names()) == {spec.name for spec in SHIPPED.values()}
