"""Held-out accuracy is what it says, the same for every arm, and asking for it moves nothing."""

import json

import pytest
import torch
from forklora.recipes import evaluate
from forklora.recipes.evaluate import Examiner, sampler_of
from forklora.recipes.options import EvaluationSpec, SamplingSpec

from forklora.trace import Trace
from tiny_policy import adapted, eager, llama, logits, recipe_of, shake, tokenizer

MANY = {"every": 1, "prompts": 40, "samples": 3}


def examiner_of(folder, **changes):
    recipe = recipe_of(folder, **changes)
    return Examiner(recipe, recipe.task.build(), tokenizer=tokenizer())


@pytest.fixture
def examiner(tmp_path):
    return examiner_of(tmp_path, evaluation=MANY)


def policy():
    return eager(llama(tied=False))


def paying(examiner, pay):
    """The same questions with another reward."""
    object.__setattr__(examiner.task, "score", pay)
    return examiner


def test_accuracy_is_the_mean_over_all_questions_and_samples(examiner):
    seen = []

    def pay(text, answer):
        seen.append((text, answer))
        return float(len(text) % 2)

    found = paying(examiner, pay).accuracy(policy())
    assert len(seen) == 40 * 3
    assert found == pytest.approx(sum(len(t) % 2 for t, _ in seen) / 120)
    assert 0 < found < 1
    # each completion is held against the answer of its own question, whatever batch it stood in
    assert [a for _, a in seen] == [q.answer for q in examiner.questions for _ in range(3)]


def test_asking_twice_gives_the_same_and_moves_nothing(examiner):
    paying(examiner, lambda text, _: len(text) / 5)
    model = policy().train()
    base, state = logits(model.eval()), torch.get_rng_state()
    model.train()
    first = examiner.accuracy(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    torch.manual_seed(123)
    assert examiner.accuracy(model) == first
    assert torch.equal(logits(model.eval()), base)
    assert examiner.seconds > 0


def test_a_completion_does_not_depend_on_what_is_asked_beside_it(examiner, monkeypatch):
    def asked(batch):
        monkeypatch.setattr(evaluate, "_BATCH", batch)
        texts = []
        paying(examiner, lambda text, _: texts.append(text) or 0.0).accuracy(policy())
        return texts

    whole = asked(64)
    assert len({*whole}) > 3
    assert asked(7) == whole


def test_it_asks_the_adapted_policy(examiner):
    paying(examiner, lambda text, _: len(text) / 5)
    model, _ = adapted("span", model=policy())
    before = examiner.accuracy(model)
    assert before == examiner.accuracy(policy())
    assert examiner.accuracy(shake(model, size=1.0)) != before


def test_special_tokens_are_no_part_of_an_answer(examiner):
    texts = []
    paying(examiner, lambda text, _: texts.append(text) or 0.0).accuracy(policy())
    assert any(texts)
    assert not any("<" in text for text in texts)


def test_questions_are_held_out_and_the_same_for_every_seed_of_a_recipe(tmp_path):
    one, other = examiner_of(tmp_path), examiner_of(tmp_path, seed=7)
    assert one.questions == other.questions
    train = recipe_of(tmp_path).task.build().examples(200, seed=0, split="train")
    assert not {q.prompt for q in one.questions} & {q.prompt for q in train}


def test_the_sampler_is_the_recipes(tmp_path):
    asked = SamplingSpec(max_new_tokens=3, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, stop=["\n"])
    recipe = recipe_of(tmp_path).model_copy(update={"sampling": asked, "evaluation": EvaluationSpec(**MANY)})
    found = sampler_of(recipe.sampling, tokenizer())
    assert (found.max_new_tokens, found.temperature, found.top_p, found.top_k, found.min_p) == (3, 0.7, 0.9, 5, 0.1)
    assert found.stop_ids == (1,)
    newline = tokenizer()("4\n")["input_ids"]
    assert found.stop(torch.tensor([newline, newline[::-1]])).tolist() == [True, False]


def test_the_map_says_in_words_what_the_trace_holds(examiner, tmp_path):
    paying(examiner, lambda text, _: float("e" in text))
    examiner.map_forks(policy(), tmp_path / "trace")
    trace = Trace.load(tmp_path / "trace" / "forks.safetensors")
    rows = json.loads((tmp_path / "trace" / "tokens.json").read_text())["rows"]
    assert len(rows) == len(trace) == 8
    for i, row in enumerate(rows):
        assert row["prompt"] == examiner.questions[i].prompt
        assert row["reward"] == trace.reward[i]
        drawn = trace.completion_ids[i][trace.completion_mask[i]]
        assert "".join(t["text"] for t in row["tokens"]) == tokenizer().decode(drawn)
        for t, token in enumerate(row["tokens"]):
            assert token["probability"] == pytest.approx(float(trace.logprob[i, t].exp()))
            listed = [p for _, p in token["candidates"]]
            assert listed == sorted(listed, reverse=True)
            assert sum(listed) <= 1 + 1e-5
            assert {tokenizer().decode([int(a)]) for a in trace.candidate_ids[i, t] if a >= 0} == {
                text for text, _ in token["candidates"]
            }


def test_the_table_holds_the_reward_of_each_question_and_sample(examiner):
    seen = []

    def pay(text, answer):
        seen.append((len(text) / 5, answer))
        return len(text) / 5

    model = policy()
    accuracy = paying(examiner, pay).accuracy(model)
    seen.clear()
    table = examiner.table(model, samples=3)
    assert table.shape == (40, 3)
    assert table.flatten().tolist() == [reward for reward, _ in seen]
    assert float(table.mean()) == accuracy
    assert [answer for _, answer in seen] == [q.answer for q in examiner.questions for _ in range(3)]


def test_another_number_of_samples_has_draws_of_its_own(tmp_path):
    examiner = examiner_of(tmp_path, evaluation=MANY | {"prompts": 1, "samples": 6})
    paying(examiner, lambda text, _: float(sum(map(ord, text))))
    model = policy()
    own, more = examiner.table(model, samples=6)[0], examiner.table(model, samples=12)[0]
    assert len(set(own.tolist())) > 1
    assert not torch.equal(more[:6], own)
    assert torch.equal(examiner.table(model, samples=12)[0], more)


def test_the_split_is_the_recipes(tmp_path):
    tests = examiner_of(tmp_path, evaluation=MANY | {"split": "test"})
    validation = examiner_of(tmp_path, evaluation=MANY)
    assert tests.questions == recipe_of(tmp_path).task.build().examples(40, seed=evaluate._SEED, split="test")
    assert not {q.prompt for q in tests.questions} & {q.prompt for q in validation.questions}
