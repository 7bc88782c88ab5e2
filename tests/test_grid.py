"""A comparison's file: equal chances for every arm, runs that share everything else, readable refusals."""

from itertools import product

import pytest
import yaml
from forklora.recipes.grid import Grid, grid_paths, load_grid
from forklora.recipes.reading import RecipeError

GRID = {
    "name": "tiny", "description": "Two arms.", "model": {"name": "nowhere"},
    "tasks": [
        {"name": "sums", "task": {"name": "addition", "options": {}}, "target": 0.5,
         "untrained": {"name": "multiplication", "options": {}}},
        {"name": "products", "task": {"name": "multiplication", "options": {}}},
    ],
    "trials": [{"steps": 2, "keep": 2}, {"steps": 3, "keep": 1}], "steps": 4, "seeds": [0, 1],
    "baseline": "plain",
    "arms": [
        {"name": "plain", "adapter": "lora", "optimizer": "adamw", "rates": [0.001, 0.01, 0.1]},
        {"name": "ours", "adapter": "span", "rates": [0.01, 0.1, 1.0]},
    ],
}  # fmt: skip


def grid(**changes):
    return Grid.model_validate(GRID | changes)


def recipes(one):
    """Every run there can be."""
    for task, arm in product(one.tasks, one.arms):
        for rate in arm.rates:
            yield from (one.trial(task, arm, rate=rate, round_=i) for i in range(len(one.trials)))
            yield from (one.report(task, arm, rate=rate, seed=seed) for seed in one.seeds)


def test_runs_have_folders_of_their_own():
    places = [(r.output, r.arms[0].name) for r in recipes(grid())]
    assert len(set(places)) == len(places) == 2 * 2 * 3 * 4


def test_arms_differ_in_nothing_but_the_arm():
    one = grid()
    for task in one.tasks:
        plain, ours = (one.report(task, arm, rate=0.5, seed=1) for arm in one.arms)
        assert plain.model_copy(update={"arms": ours.arms}) == ours
        assert [r.arms[0].rate for r in (plain, ours)] == [0.5, 0.5]


def test_rates_are_chosen_on_other_questions_and_another_seed_than_results():
    one = grid()
    reported = [r for r in recipes(one) if r.part.round == "report"]
    tried = [r for r in recipes(one) if r.part.round != "report"]
    assert {r.evaluation.split for r in reported} == {"test"}
    assert {r.evaluation.split for r in tried} == {"validation"}
    assert {r.seed for r in reported} == {0, 1}
    assert {r.seed for r in tried} == {one.trial_seed}
    assert all(r.forks.seed == r.seed for r in recipes(one))
    assert {(r.part.round, r.steps) for r in tried} == {("trial1", 2), ("trial2", 3)}
    assert all(r.outcome is None for r in tried)
    assert {(r.part.task, r.outcome.untrained and r.outcome.untrained.name) for r in reported} == {
        ("sums", "multiplication"), ("products", None),
    }  # fmt: skip


def test_an_arms_own_forks_take_the_runs_seed_unless_they_state_one():
    arms = [
        GRID["arms"][0],
        {**GRID["arms"][1], "forks": {"task": {"name": "multiplication", "options": {}}}},
        {**GRID["arms"][1], "name": "stated", "forks": {"seed": 7}},
    ]
    one = grid(arms=arms)
    seeds = [one.report(one.tasks[0], arm, rate=0.1, seed=1).arms[0].forks.seed for arm in one.arms[1:]]
    assert seeds == [1, 7]
    kept = {one.report(one.tasks[0], arm, rate=0.1, seed=1).arms[0].forks.kept_in for arm in one.arms[1:]}
    assert kept == {one.report(one.tasks[0], one.arms[0], rate=0.1, seed=1).forks.kept_in}


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("arms.ours.rates=[0.1, 1.0]", "as many different rates as every other; there are: plain 3, ours 2"),
        ("arms.ours.rates=[0.1, 1.0, 1.0]", "plain 3, ours 2"),
        ("baseline=plane", "baseline 'plane' is no arm (did you mean 'plain'?)"),
        ("trials=[{steps: 2, keep: 2}]", "the last one 1"),
        ("trials=[{steps: 2, keep: 4}, {steps: 2, keep: 1}]", "at most what it got"),
        ("seeds=[0, 0]", "must differ from each other"),
        ("seeds=[1000]", "trial_seed 1000"),
        ("seeds=[]", "at least one entry"),
        ("arms.ours.name=plain", "arms need different names"),
        ("tasks.1.name=sums", "tasks need different names"),
        ("tasks.1.task.name=adition", "unknown task 'adition' (did you mean 'addition'?)"),
        ("arms.ours.rate=0.1", "unknown key 'arms.1.rate' (did you mean 'rates'?)"),
        ("arms.plain.rates=[0, 1, 2]", "greater than 0"),
        ("ranks=3", "cannot be shared evenly"),
        ("deepspeed=zero9", "zero9"),
        ("bogus=1", "unknown key 'bogus'"),
    ],
)
def test_a_bad_comparison_is_refused_by_name(tmp_path, override, says):
    path = tmp_path / "grid.yaml"
    path.write_text(yaml.safe_dump(GRID))
    load_grid(path)
    with pytest.raises(RecipeError) as caught:
        load_grid(path, [override])
    assert says in str(caught.value)


@pytest.mark.parametrize("name", sorted(grid_paths()))
def test_shipped_comparisons_give_every_arm_five_rates_over_equal_spans(name):
    one = load_grid(name)
    assert one.name == name
    spans = {round(max(arm.rates) / min(arm.rates)) for arm in one.arms}
    assert {len(arm.rates) for arm in one.arms} == {5}
    assert len(spans) == 1
    assert one.deepspeed is not None


def test_an_unknown_comparison_names_the_nearest():
    with pytest.raises(RecipeError, match="did you mean 'headline'"):
        load_grid("headlines")
