"""The Fisher of one half of the prompts is held against the gradient of the other, and both are those of plain sums."""

import pytest
import torch
from forklora.recipes.fisher_run import _concentration, run_fisher
from forklora.recipes.opening import opened
from forklora.recipes.refusal import Refusal
from forklora.recipes.spans import rollouts
from forklora.recipes.subject import FisherSubject, load_subject

from forklora.backward import linear_layers
from forklora.fisher import FisherSums, membership, top_coordinates
from tiny_policy import LAYERS, guessing, llama, tokenizer

TASK = {"name": "multiplication", "options": {"low": 0, "high": 2, "shots": 1}}


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fisher") / "model"
    guessing(llama(tied=False)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    model = {"name": str(folder), "dtype": "float32"}
    asked = {"task": TASK, "count": 18, "group": 6, "share": 0.05, "factored": 2}
    return FisherSubject.model_validate({"model": model, **asked})


@pytest.fixture(scope="module")
def look(subject):
    return run_fisher(subject)


def test_halves_figures_and_coordinates_are_those_of_plain_sums(subject, look):
    result, largest = look
    found = opened(subject)
    names, place, halves = linear_layers(found.model), 0, []
    halves = [FisherSums(found.model, names) for _ in range(2)]
    for trace in rollouts(found, subject):
        for i in range(0, len(trace), subject.group):
            part = trace.select(list(range(i, i + subject.group)))
            reward = found.rewards(part, first=place, samples=subject.group).float()
            halves[place % 2].add(found.model, part, advantages=reward - reward.mean())
            place += 1
    figures = result["figures"]
    assert (figures["rollouts"], len(result["layers"]), place) == (18 * 6, LAYERS, 18)
    fisher = top_coordinates({name: halves[0].fisher(name) for name in names}, share=0.05)
    assert membership(fisher, largest) > 0.999
    wanted = top_coordinates({name: halves[1].gradient(name).abs() for name in names}, share=0.05)
    assert figures["held_other"] == pytest.approx(membership(wanted, fisher), abs=1e-3)
    assert 0.05 < figures["held_other"] < 1 and figures["held_same"] > 0.05
    assert figures["numbers_that_hold_half_the_fisher"] < 0.2
    for entry in result["layers"]:
        assert entry["fisher"] == pytest.approx(float(halves[0].fisher(entry["layer"]).sum()), rel=1e-3)


def test_the_cap_holds_on_the_same_completions_and_rows_are_sums_of_layers(look):
    result, _ = look
    every = result["rows"][-1]
    assert every["layers"] == "all" and every["same_broken"] == 0
    assert every["other_broken"] == pytest.approx(
        sum(e["other"]["broken"] for e in result["layers"]) / sum(e["numbers"] for e in result["layers"])
    )
    for key in ("numbers_share", "fisher_share", "gradient_energy_share", "top_fisher_share", "top_gradient_share"):
        assert every[key] == pytest.approx(1) == sum(row[key] for row in result["rows"][:-1])
    assert len(result["factored"]) == 2 and all(0 <= e["energy_broken"] <= 1 for e in result["factored"])


def test_half_of_the_fisher_is_found_as_by_sorting(look):
    class Values:
        """Numbers of two layers."""

        def fisher(self, name):
            return torch.logspace(-6, 0, 500, dtype=torch.float64).view(5, 100) * (1 if name == "a" else 3)

    everything = torch.cat([Values().fisher(name).flatten() for name in "ab"]).sort(descending=True).values
    needed = int((everything.cumsum(0) < everything.sum() / 2).sum()) + 1
    assert _concentration(Values(), ["a", "b"]) == pytest.approx(needed / 1000, abs=2e-3)


def test_no_rewards_are_refused_and_equal_ones_are_no_gradient(subject, tmp_path):
    with pytest.raises(Refusal, match="gradient needs rewards"):
        load_subject(FisherSubject, "m", overrides=[], prompts=__file__)
    llama(tied=False).save_pretrained(tmp_path)  # it knows nothing of larger numbers, so that every reward is zero
    tokenizer().save_pretrained(tmp_path)
    model = subject.model.model_copy(update={"name": str(tmp_path)})
    task = subject.task.model_copy(update={"options": {"low": 50, "high": 99}})
    result, _ = run_fisher(subject.model_copy(update={"model": model, "count": 2, "task": task}))
    assert result["figures"]["held_other"] is None and result["figures"]["held_same"] is None
