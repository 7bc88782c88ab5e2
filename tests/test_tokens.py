"""Rollouts in words say what the trace says, position by position."""

from dataclasses import replace

import pytest
import torch
from forklora.recipes.tokens import token_rows

from forklora.rollouts import Sampler, sample
from tiny_policy import eager, llama, tokenizer


@pytest.fixture(scope="module")
def trace():
    words = tokenizer()
    prompts = [words(text)["input_ids"] for text in ("1 + 1 =", "2 + 22 =")]
    return sample(eager(llama(tied=False)), prompts, sampler=Sampler(max_new_tokens=6, stop_ids=(1,), keep=64), group=3)


def test_every_drawn_token_stands_with_its_probability_and_candidates(trace):
    rows = token_rows(trace, tokenizer().decode)
    assert [row["prompt"] for row in rows] == ["1 + 1 ="] * 3 + ["2 + 22 ="] * 3
    assert [len(row["tokens"]) for row in rows] == trace.completion_mask.sum(1).tolist()
    assert all(row["reward"] is None for row in rows)
    for i, row in enumerate(rows):
        assert "".join(token["text"] for token in row["tokens"]) == tokenizer().decode(
            trace.completion_ids[i][trace.completion_mask[i]]
        )
        for t, token in enumerate(row["tokens"]):
            assert token["probability"] == pytest.approx(float(trace.logprob[i, t].exp()))
            assert token["spread"] == pytest.approx(float(trace.spread[i, t]))
            shares = [share for _, share in token["candidates"]]
            assert shares == sorted(shares, reverse=True)
            assert dict(token["candidates"])[token["text"]] == pytest.approx(token["probability"], rel=1e-4)


def test_digits_are_those_asked_for_and_rewards_are_told(trace):
    scored = replace(trace, reward=torch.arange(6.0))
    rows = token_rows(scored, tokenizer().decode, digits=2)
    assert [row["reward"] for row in rows] == [0, 1, 2, 3, 4, 5]
    numbers = [token[key] for row in rows for token in row["tokens"] for key in ("probability", "spread")]
    assert all(number == float(f"{number:.2g}") for number in numbers)
