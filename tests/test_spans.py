"""The span of a task's rollouts is that of the same rollouts saved, and a trace of something else is refused."""

import pytest
import torch
from forklora.recipes.measure_plan import MeasurePlan
from forklora.recipes.opening import opened
from forklora.recipes.refusal import Refusal
from forklora.recipes.spans import read_spans, rollouts

from forklora.measure import overlap
from forklora.trace import Trace
from tiny_policy import LAYERS, eager, llama, tokenizer

SIZE = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spans") / "model"
    eager(llama(tied=False)).to(torch.bfloat16).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def plan_of(model, **given):
    asked = {"base": model, "tuned": model, "top": SIZE, "count": 20, "group": 4, "sampling": {"stop": []}}
    return MeasurePlan.model_validate(asked | given)


@pytest.fixture(scope="module")
def of_task(model):
    plan = plan_of(model, task={"name": "multiplication"})
    return plan, rollouts(opened(plan.subject), plan.subject), read_spans(plan)


def test_nothing_asked_is_no_span(model):
    assert read_spans(plan_of(model)) is None


def test_every_layer_has_a_carried_span_and_those_that_write_into_the_stream_the_span_itself(of_task):
    _, traces, spans = of_task
    bases, identity = spans.bases, spans.identity
    assert len(bases) == LAYERS and bases.facts["rollouts"] == "80" == str(sum(map(len, traces)))
    assert {name.rpartition(".")[2] for name in identity} == {"o_proj", "down_proj"}
    for basis in bases.values():
        assert torch.allclose(basis.output.T @ basis.output, torch.eye(SIZE), atol=1e-5)
        assert basis.input.shape[1] == SIZE


def test_saved_rollouts_give_the_same_spans(of_task, model, tmp_path):
    _, traces, spans = of_task
    bases, identity = spans.bases, spans.identity
    file = tmp_path / "trace.safetensors"
    Trace.concat(traces).save(file)
    found = read_spans(plan_of(model, trace=str(file)))
    for name in bases:
        assert overlap(found.bases[name].output, bases[name].output) == pytest.approx(1, abs=1e-3)
        assert overlap(found.bases[name].input, bases[name].input) == pytest.approx(1, abs=1e-3)
    for name, span in identity.items():
        assert overlap(found.identity[name], span) == pytest.approx(1, abs=1e-3)


def test_the_global_random_state_is_left_alone(of_task):
    plan, *_ = of_task
    state = torch.get_rng_state()
    read_spans(plan)
    assert torch.equal(torch.get_rng_state(), state)


def test_traces_without_a_signal_of_another_model_or_with_single_completions_are_refused(of_task, model, tmp_path):
    _, traces, _ = of_task
    file = tmp_path / "trace.safetensors"
    traces[0].without_delta().save(file)
    with pytest.raises(Refusal, match="holds no backward signal"):
        read_spans(plan_of(model, trace=str(file)))
    traces[0].select([0, 4, 8]).save(file)
    with pytest.raises(Refusal, match="one completion"):
        read_spans(plan_of(model, trace=str(file)))
    other = tmp_path / "other"
    eager(llama(tied=False, width=48, heads=4)).save_pretrained(other)
    tokenizer().save_pretrained(other)
    traces[0].save(file)
    with pytest.raises(Refusal, match="not of this model: its signal has 32 numbers"):
        read_spans(plan_of(str(other), trace=str(file)))
    file.write_bytes(b"nothing")
    with pytest.raises(Refusal, match="cannot be read as rollouts"):
        read_spans(plan_of(model, trace=str(file)))
