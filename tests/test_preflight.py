"""What does not fit is said before anything long: one message for each impossible arm, all of them together."""

import pytest
import torch
from forklora.recipes.config import Recipe
from forklora.recipes.preflight import check_recipe
from forklora.recipes.refusal import Refusal

from tiny_policy import gpt2, recipe_of

IMPOSSIBLE = {
    "odd": ({"adapter": "lora", "init": "orthogonal", "rank": 3}, "takes an even rank, and rank is 3"),
    "pissa": ({"adapter": "lora", "init": "pissa", "rank": 20}, r"20 output directions asked for, .*k_proj has 16"),
    "mica": ({"adapter": "lora", "init": "mica", "rank": 20}, r"20 output directions asked for"),
    "olora": ({"adapter": "lora", "init": "olora", "rank": 20}, r"20 output directions asked for"),
    "eva": ({"adapter": "lora", "init": "eva", "rank": 17}, r"34 input directions asked for, .*q_proj has 32"),
    "ga": ({"adapter": "lora", "init": "lora_ga", "rank": 9}, r"18 output directions asked for"),
    "tiny": ({"adapter": "tinylora", "rank": 20}, r"20 output directions asked for"),
    "span": ({"adapter": "span", "rank": 20}, r"20 output directions asked for, .*k_proj has 16"),
    "inputs": ({"adapter": "inputs", "rank": 40}, r"40 input directions asked for, .*q_proj has 32"),
    "block": ({"adapter": "block", "rank": 2, "width": 20}, r"20 output directions asked for"),
    "core": ({"adapter": "core", "rank": 4, "width": 2}, r"cannot carry rank"),
    "layers": ({"adapter": "span", "layers": 99}, r"layers=99, and only 14 layers"),
    "target": ({"adapter": "lora", "targets": ["q_prij"]}, r"q_prij"),
    "moved": ({"adapter": "lora", "init": "pissa", "base_prompts": 4}, r"base_prompts needs .* init=pissa changes it"),
    "full": ({"adapter": "full", "base_prompts": 4}, r"base_prompts needs .* adapter=full changes it"),
    "share": ({"adapter": "lora", "base_prompts": 3}, r"base_prompts=3 are no whole number of steps of prompts=2"),
}
POSSIBLE = [
    {"adapter": "lora", "rank": 40},
    {"adapter": "lora", "init": "orthogonal", "rank": 4},
    {"adapter": "lora", "init": "pissa", "rank": 16},
    {"adapter": "lora", "init": "eva", "rank": 16},
    {"adapter": "lora", "init": "lora_ga", "rank": 8},
    {"adapter": "tinylora", "rank": 16},
    {"adapter": "span", "rank": 16, "layers": 14},
    {"adapter": "inputs", "rank": 32},
    {"adapter": "full"},
    {"adapter": "lora", "base_prompts": 4},
]


def recipe_with(folder, arms, **changes):
    content = recipe_of(folder).model_dump(mode="json") | changes
    content["arms"] = [{"name": f"arm{i}", "rate": 0.1} | arm for i, arm in enumerate(arms)]
    return Recipe.model_validate(content)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("preflight")


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_arm_is_refused_with_one_message(name, folder):
    arm, words = IMPOSSIBLE[name]
    with pytest.raises(Refusal, match=words) as refused:
        check_recipe(recipe_with(folder, [{"adapter": "lora"}, arm]))
    lines = str(refused.value).splitlines()
    assert len(lines) == 2 and lines[1].startswith("  arm1: ")


def test_all_impossible_arms_are_named_together_and_each_once(folder):
    arms = [arm for arm, _ in IMPOSSIBLE.values()]
    recipe = recipe_with(folder, arms)
    twice = recipe.model_copy(update={"arms": recipe.arms * 2})  # a comparison has an arm for each rate and seed
    for one in (recipe, twice):
        with pytest.raises(Refusal) as refused:
            check_recipe(one)
        named = [line.split(":")[0].strip() for line in str(refused.value).splitlines()[1:]]
        assert named == [f"arm{i}" for i in range(len(arms))]


def test_what_fits_passes(folder):
    check_recipe(recipe_with(folder, POSSIBLE))


def test_layers_that_store_their_weights_the_other_way_round_are_measured_right(tmp_path):
    recipe_of(tmp_path, policy=gpt2())
    check_recipe(recipe_with(tmp_path, [{"adapter": "inputs", "rank": 32}, {"adapter": "span", "rank": 32}]))
    with pytest.raises(Refusal, match="33 input directions"):
        check_recipe(recipe_with(tmp_path, [{"adapter": "inputs", "rank": 33}]))


def test_a_model_that_is_not_there_is_refused_by_name(folder):
    with pytest.raises(Refusal, match="cannot use the model '/nowhere/at/all'"):
        check_recipe(recipe_with(folder, POSSIBLE, model={"name": "/nowhere/at/all"}))


def test_fewer_questions_than_ranks_cannot_be_shared(folder):
    arms = [{"adapter": "lora", "init": "lora_ga"}]
    with pytest.raises(Refusal, match="shares forks.prompts=1 among ranks=2"):
        check_recipe(recipe_with(folder, arms, ranks=2, forks={"prompts": 1}))


def test_more_ranks_than_accelerators_are_refused(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(Refusal, match="ranks=2, but there are 1 accelerators"):
        check_recipe(recipe_with(folder, POSSIBLE, ranks=2))
