"""A subject that is loaded is the model, the prompts and the sampler that were named."""

import pytest
import torch
from forklora.recipes.opening import opened
from forklora.recipes.options import TaskSpec
from forklora.recipes.refusal import Refusal
from forklora.recipes.subject import Subject

from forklora.rollouts import sample
from tiny_policy import eager, llama, tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("subject") / "model"
    eager(llama(tied=False)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def test_a_task_brings_length_stops_and_rewards(model):
    asked = {"model": {"name": model, "dtype": "float32"}, "task": TaskSpec(name="multiplication"), "count": 3}
    found = opened(Subject.model_validate(asked))
    assert len(found.prompts) == len(found.examples) == 3
    assert found.sampler.max_new_tokens == found.task.max_new_tokens
    trace = sample(found.model, found.prompts[1:], sampler=found.sampler, group=2, luck=lambda _: torch.full((4,), 0.5))
    answers = [found.examples[1 + i // 2].answer for i in range(4)]
    texts = [found.tokenizer.decode(r[m]) for r, m in zip(trace.completion_ids, trace.completion_mask, strict=True)]
    expected = [found.task.score(t, a) for t, a in zip(texts, answers, strict=True)]
    assert found.rewards(trace, first=1, samples=2).tolist() == expected


def test_a_file_brings_no_reward_and_its_first_prompts(model, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("a b\nb a\na a\n")
    asked = {"model": {"name": model, "dtype": "float32"}, "prompts": str(path), "count": 2}
    found = opened(Subject.model_validate(asked))
    assert [found.tokenizer.decode(ids) for ids in found.prompts] == ["a b", "b a"]
    assert found.sampler.stop is None
    with pytest.raises(Refusal, match="no reward"):
        found.rewards(sample(found.model, found.prompts, sampler=found.sampler), first=0, samples=1)
