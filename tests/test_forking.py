"""A look at the forks says what the rollouts say, and gives them back whole."""

import pytest
import torch
from forklora.recipes.forking import run_forks
from forklora.recipes.subject import ForkSubject
from transformers import Gemma2Config, Gemma2ForCausalLM

from forklora.forks import find_forks
from tiny_policy import eager, guessing, llama, tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forking") / "model"
    eager(guessing(llama(tied=False))).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def subject_of(model, **given):
    asked = {"model": {"name": model, "dtype": "float32"}, "count": 20, "group": 2, "sampling": {"temperature": 0.8}}
    return ForkSubject.model_validate(asked | {"task": {"name": "multiplication"}} | given)


@pytest.fixture(scope="module")
def look(model):
    return run_forks(subject_of(model))


def test_figures_are_those_of_the_rollouts(look):
    result, trace = look
    figures, drawn = result["figures"], trace.completion_mask
    assert (figures["rollouts"], figures["prompts"], figures["positions"]) == (40, 20, int(drawn.sum()))
    forks = find_forks(trace)
    assert figures["forks"] == len(forks) > 0
    assert figures["distinct_forks"] == len({tuple(sorted(ids.tolist())) for ids in forks.ids})
    assert figures["mean_spread"] == pytest.approx(float(trace.spread[drawn].mean()), rel=1e-5)
    assert figures["mean_reward"] == pytest.approx(float(trace.reward.mean()))
    assert 0 < figures["spread_at_forks"] <= 1 and sum(fork["count"] for fork in result["frequent"]) <= len(forks)
    assert [row["reward"] for row in result["rows"]] == trace.reward.tolist()


def test_bounds_hold_on_the_data_and_the_spectrum_adds_up(look):
    result, trace = look
    bounds, signal = result["bounds"], trace.delta[trace.completion_mask].double()
    assert (bounds["spread_above_near"], bounds["near_above_far"]) == (0, 0)
    assert 0 <= bounds["outside"] <= bounds["outside_bound"] and 0 < bounds["spread_of_near"] <= 1.001
    exact = torch.linalg.eigvalsh(signal.T @ signal / len(signal)).flip(0)
    assert result["spectrum"] == pytest.approx(exact.tolist(), rel=1e-6, abs=1e-9)
    held = [entry["dimension"] for entry in result["span"]["held"]]
    assert held == sorted(held) and held[-1] <= result["span"]["dimension"] <= min(32, result["span"]["counted"])


def test_the_same_seed_gives_the_same_look_and_leaves_the_random_state_alone(model, look):
    state = torch.get_rng_state()
    again, trace = run_forks(subject_of(model))
    assert torch.equal(trace.completion_ids, look[1].completion_ids)
    assert again["figures"] == pytest.approx(look[0]["figures"], rel=1e-5)
    assert [fork["count"] for fork in again["frequent"]] == [fork["count"] for fork in look[0]["frequent"]]
    assert torch.equal(torch.get_rng_state(), state)


def test_prompts_of_a_file_have_no_reward(model, tmp_path):
    (tmp_path / "asked.txt").write_text("1 + 1 =\n2 * 3 =\n")
    result, trace = run_forks(subject_of(model, task=None, prompts=str(tmp_path / "asked.txt"), group=3))
    assert trace.reward is None and result["figures"]["mean_reward"] is None
    assert result["figures"]["rollouts"] == 6 and {row["reward"] for row in result["rows"]} == {None}


def test_a_soft_cap_leaves_the_bounds_out(tmp_path):
    config = Gemma2Config(
        vocab_size=len(tokenizer()), hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2,
        final_logit_softcapping=5.0, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    result, _ = run_forks(subject_of(str(tmp_path), count=2))
    assert result["bounds"] is None and result["span"] is None and result["figures"]["positions"] > 0
