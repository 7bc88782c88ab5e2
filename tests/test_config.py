"""Recipes: what ships loads, what is wrong is named with the nearest right thing, what is loaded is frozen."""

import json
import math

import pytest
import yaml
from forklora.recipes.config import Recipe, find_recipe, load_recipe, recipe_paths
from forklora.recipes.reading import RecipeError, parsed_override, put, read_yaml
from forklora.recipes.wording import described_options
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

SMALL = {
    "name": "small",
    "description": "A recipe with as little as possible.",
    "task": {"name": "multiplication"},
    "arms": [{"name": "one", "adapter": "span", "rate": 0.05}, {"name": "two", "adapter": "lora", "rate": 1e-3}],
}


@pytest.fixture
def small(tmp_path):
    """Path of a recipe file with only what is required."""
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return path


def refusal(path, *overrides):
    """The message with which the recipe is refused; it must fit on a screen."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, list(overrides))
    message = str(caught.value)
    assert len(message.splitlines()) <= 24
    return message


@pytest.mark.parametrize("name", recipe_paths())
def test_every_shipped_recipe_loads_and_survives_being_written_down(name, tmp_path):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.output == f"runs/{name}"
    path = tmp_path / "again.yaml"
    path.write_text(json.dumps(recipe.model_dump(mode="json")))
    assert load_recipe(path) == recipe


def test_the_quickstart_is_the_main_job():
    recipe = load_recipe("quickstart")
    assert (recipe.model.name, recipe.task.name) == ("smollm2-135m", "multiplication")
    assert (recipe.steps, recipe.prompts, recipe.group, recipe.target) == (15, 16, 8, 0.8)
    assert (recipe.evaluation.every, recipe.evaluation.prompts, recipe.evaluation.samples) == (2, 128, 4)
    arms = [(arm.adapter, arm.rank, arm.width, arm.optimizer, arm.rate) for arm in recipe.arms]
    assert arms == [
        ("lora", 1, None, "adamw", 3e-3),
        ("span", 1, None, "length", 0.1),
        ("block", 4, 4, "length", 0.1),
    ]


def test_what_is_left_open_is_resolved_and_what_is_stated_stays(small):
    open_, stated = (
        load_recipe(small),
        load_recipe(
            small, ["sampling.max_new_tokens=7", "sampling.stop=[]", "arms.0.alpha=2", "arms.0.rank=3", "arms.1.rank=3"]
        ),
    )
    assert (open_.sampling.max_new_tokens, open_.sampling.stop) == (5, ["\n"])
    assert [arm.alpha for arm in open_.arms] == [1.0, 1.0]
    assert (stated.sampling.max_new_tokens, stated.sampling.stop) == (7, [])
    assert [arm.alpha for arm in stated.arms] == [2.0, 3.0]


def test_a_recipe_is_frozen_at_every_depth(small):
    recipe = load_recipe(small)
    for group, field in ((recipe, "steps"), (recipe.sampling, "top_p"), (recipe.arms[0], "rate")):
        with pytest.raises(ValidationError):
            setattr(group, field, 1)
    assert isinstance(recipe.arms, tuple)


OPTIONS = [key.replace(".N.", ".1.") for key, *_ in described_options(Recipe)]


@pytest.mark.parametrize("key", [key for key in OPTIONS if not key.endswith(("min_p", "top_p", "top_k"))])
def test_a_misspelled_option_is_answered_with_the_right_one(key, small):
    right = key.rsplit(".", 1)[-1]
    wrong = key + "x" if len(right) < 5 else key[:-2] + key[-1] + key[-2]
    message = refusal(small, f"{wrong}=1")
    assert f"unknown key {wrong!r} (did you mean {right!r}?)" in message
    assert "allowed here:" in message


def test_every_option_says_what_it_is():
    described = list(described_options(Recipe))
    assert len(described) > 25
    unsaid = [key for key, kind, _, about in described if not about.endswith(".") or kind == "mapping"]
    assert all(key.endswith("task.options") or key.endswith("untrained.options") for key in unsaid)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("steps=1.5", "steps = 1.5: expected whole number. Optimizer steps"),
        ("steps=true", "steps = True: expected whole number"),
        ("steps='3'", "steps = '3': expected whole number"),
        ("steps=-1", "steps = -1: must be greater than or equal to 0"),
        ("group=1", "group = 1: must be greater than or equal to 2"),
        ("target=1.5", "target = 1.5: must be less than or equal to 1"),
        ("output=", "output = None: expected text"),
        ("model.dtype=int4", "expected bfloat16 | float16 | float32"),
        ("sampling.temperature=0", "sampling.temperature = 0: must be greater than 0"),
        ("sampling.stop=x", "sampling.stop = 'x': expected list of text | null"),
        ("arms.0.rate=.nan", "arms.0.rate = nan: must be a finite number"),
        ("arms.0.adapter=spam", "'spam' (did you mean 'span'?): expected lora | span | core | inputs | block"),
        ("arms.0.targets=3", "arms.0.targets = 3: expected all-linear | list of text"),
        ("arms.0.name=a/b", "arms.0.name = 'a/b'"),
        ("arms.0={}", "arms.0.rate is missing"),
        ("arms=[]", "arms = []: expected at least one entry"),
        ("arms.1.name=one", "arms need different names; used more than once: one"),
        ("arms.0.width=2", "width is for the adapters core, block and tinylora"),
        ("arms.1.train_basis=true", "train_basis is for fork adapters; 'lora' has none"),
        ("evaluation=3", "evaluation = 3: expected mapping"),
        ("task.name=additoin", "unknown task 'additoin' (did you mean 'addition'?)"),
        ("task.options.hihg=3", "unknown option 'hihg' of task 'multiplication' (did you mean 'high'?)"),
        ("task.options.high=x", "high: Input should be a valid integer"),
        ("arms.2.rate=1", "'arms' has no entry '2'; it has: 0 (one), 1 (two)"),
        ("arms.three.rate=1", "'arms' has no entry 'three'"),
        ("name.x=1", "'name' is 'small', which has no parts"),
        ("steps", "write key=value"),
        ("=3", "write key=value"),
        ("a..b=3", "write key=value"),
        ("steps=[3", "the value of 'steps' is not readable YAML"),
    ],
)
def test_a_bad_override_is_refused_with_key_value_and_what_is_allowed(override, says, small):
    assert says in refusal(small, override)


def test_many_mistakes_are_told_at_once_but_on_one_screen(small):
    assert len(refusal(small, "steps=a", "group=b", "seed=c").splitlines()) == 4
    assert "more" in refusal(small, *(f"x{i}=1" for i in range(40)))


def test_overrides_change_what_they_name_and_nothing_else(small):
    changed = load_recipe(small, ["steps=3", "evaluation.prompts=32", "arms.0.rate=1e-3", "arms.two.rank=2"])
    assert (changed.steps, changed.evaluation.prompts, changed.arms[0].rate, changed.arms[1].rank) == (3, 32, 1e-3, 2)
    back = ["steps=15", "evaluation.prompts=128", "arms.0.rate=0.05", "arms.two.rank=1"]
    assert load_recipe(small, ["steps=3", "evaluation.prompts=32", "arms.0.rate=1e-3", "arms.two.rank=2", *back]) == (
        load_recipe(small)
    )


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_ranks_that_share_the_prompts_evenly_are_taken(small, ranks):
    recipe = load_recipe(small, [f"ranks={ranks}", "deepspeed=zero2"])
    assert (recipe.ranks, recipe.deepspeed) == (ranks, "zero2")


def test_a_recipe_says_nothing_of_ranks_and_runs_alone(small):
    assert (load_recipe(small).ranks, load_recipe(small).deepspeed) == (1, None)


def test_a_group_is_never_split_over_ranks(small):
    message = refusal(small, "ranks=3")
    assert "prompts = 16 cannot be shared evenly by ranks = 3" in message and "a multiple of 3" in message
    # 2 prompts of 8 make 16 rollouts: enough for 4 ranks, but each would get half a group
    assert "cannot be shared" in refusal(small, "ranks=4", "prompts=2", "group=8")
    assert "must be greater than or equal to 1" in refusal(small, "ranks=0")


def test_deepspeed_configurations_are_looked_at_when_a_recipe_is_loaded(small, tmp_path):
    assert "deepspeed: there is no DeepSpeed configuration 'zer2' (did you mean 'zero2'?)" in refusal(
        small, "deepspeed=zer2"
    )
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    assert load_recipe(small, [f"deepspeed={mine}"]).deepspeed == str(mine)
    mine.write_text(json.dumps({"optimizer": {"type": "AdamW"}}))
    assert "'optimizer' would replace the optimizer of every arm" in refusal(small, f"deepspeed={mine}")
    assert "expected text" in refusal(small, "deepspeed=2")


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    SCALARS | st.text(st.characters(min_codepoint=32, max_codepoint=126)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)


@given(VALUES)
def test_a_value_written_as_json_is_read_as_that_value(value):
    parts, read = parsed_override(f"a.b={json.dumps(value)}")
    assert parts == ["a", "b"]
    assert json.dumps(read, sort_keys=True) == json.dumps(value, sort_keys=True)


@given(st.floats(min_value=1e-12, max_value=1e12), st.integers(0, 6))
def test_a_rate_is_a_number_however_it_is_written(rate, digits):
    written = f"{rate:.{digits}e}"
    assert math.isclose(parsed_override(f"rate={written}")[1], float(written))


@given(st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=4), VALUES)
def test_what_is_put_is_found_again(parts, value):
    data = {}
    put(data, parts, value=value)
    for part in parts:
        data = data[part]
    assert data == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("steps: 3\nsteps: 4\n", "key 'steps' stands twice"),
        ("arms: [{name: a, name: b}]\n", "key 'name' stands twice"),
        ("- 1\n", "holds no keys"),
        ("", "holds no keys"),
        ("steps: [3\n", "not readable YAML"),
        ("steps: !!python/object/apply:os.getcwd []\n", "not readable YAML"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(text, says, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert says in refusal(path)


def test_a_file_in_another_encoding_is_refused(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_bytes("name: Größe".encode("utf-16"))
    with pytest.raises(RecipeError, match="cannot read"):
        read_yaml(path)


def test_an_unknown_recipe_is_answered_with_the_nearest_and_all_names():
    with pytest.raises(RecipeError, match="did you mean 'quickstart'") as caught:
        find_recipe("quikstart.yaml")
    assert all(name in str(caught.value) for name in recipe_paths())


def test_a_file_goes_before_a_shipped_recipe_of_that_name(small, monkeypatch):
    small.rename(small.with_name("quickstart"))
    monkeypatch.chdir(small.parent)
    assert load_recipe("quickstart").name == "small"
