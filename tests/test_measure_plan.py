"""What is to be measured is refused or complete before any weight is read."""

import pytest
from forklora.recipes.measure_plan import load_measure
from forklora.recipes.refusal import Refusal


def test_a_plan_holds_what_was_given_and_asks_the_base():
    plan = load_measure("a", "b", task="addition", overrides=["top=4", "count=3", "task.options={low: 7}"])
    assert (plan.base, plan.tuned, plan.top, plan.trace) == ("a", "b", 4, None)
    subject = plan.subject
    assert (subject.model.name, subject.count, subject.group, subject.seed) == ("a", 3, plan.group, plan.seed)
    assert subject.task.options == {"low": 7}


def test_forks_come_from_one_place_at_most(tmp_path):
    file = tmp_path / "trace.safetensors"
    file.write_bytes(b"")
    assert load_measure("a", "b").task is None
    assert load_measure("a", "b", trace=str(file)).trace == str(file)
    with pytest.raises(Refusal, match="give one of the two"):
        load_measure("a", "b", task="addition", trace=str(file))


def test_what_cannot_be_is_named(tmp_path):
    with pytest.raises(Refusal, match="no file of rollouts"):
        load_measure("a", "b", trace=str(tmp_path / "none"))
    with pytest.raises(Refusal, match="did you mean 'exact'"):
        load_measure("a", "b", overrides=["exat=4"])
    with pytest.raises(Refusal, match="task: "):
        load_measure("a", "b", task="adition")
