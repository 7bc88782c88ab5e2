"""What both sides are given: prompts of exact lengths, rewards that differ, an end that is never drawn."""

import pytest
from forklora.recipes.bench_inputs import END, exact_prompts, hashed_reward, policy, word_tokenizer
from forklora.recipes.bench_plan import SideSpec, read_shape
from forklora.recipes.refusal import Refusal

from tiny_policy import llama, tokenizer


@pytest.mark.parametrize("make", [tokenizer, lambda: word_tokenizer(500)])
@pytest.mark.parametrize("length", [2, 9, 200])
def test_prompts_have_exactly_the_length_asked_for_and_differ(make, length):
    words = make()
    prompts = exact_prompts(words, length=length, count=30, seed=3)
    assert {len(words(text)["input_ids"]) for text in prompts} == {length}
    assert len(set(prompts)) == 30
    assert prompts == exact_prompts(words, length=length, count=30, seed=3)
    assert prompts != exact_prompts(words, length=length, count=30, seed=4)


@pytest.mark.parametrize("merges", [[], [("a", "b")]])
def test_special_tokens_count_as_prompt_and_merging_tokens_are_drawn_again(merges):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "<s>": 3}, merges))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.WhitespaceSplit(), decoders.Fuse()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    words = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>")
    prompts = exact_prompts(words, length=7, count=20, seed=0)
    assert {len(words(text)["input_ids"]) for text in prompts} == {7}
    assert any("ab" in text for text in prompts)
    with pytest.raises(Refusal, match="it adds 1 special tokens"):
        exact_prompts(words, length=1, count=1, seed=0)


def test_no_side_can_draw_the_end_of_sequence(tmp_path):
    llama(tied=False).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    for vocabulary, size in ((None, len(tokenizer())), (300, 300)):
        spec = SideSpec(side="ours", shape=read_shape("8/4/2"), repeats=1, seed=0, vocabulary=vocabulary,
                        model={"name": str(tmp_path), "dtype": "float32"})  # fmt: skip
        policy_, words = policy(spec)
        assert policy_.get_output_embeddings().weight.shape[0] == size
        assert words.eos_token_id == policy_.generation_config.eos_token_id == policy_.config.eos_token_id == size
        assert words.eos_token == END and words.pad_token_id < size


def test_rewards_are_in_the_unit_interval_repeat_and_differ():
    texts = [f"text {i}" for i in range(50)]
    rewards = hashed_reward(1)(completions=texts, prompts=None)
    assert all(0 <= reward < 1 for reward in rewards) and len(set(rewards)) == 50
    assert 0.3 < sum(rewards) / 50 < 0.7
    assert rewards == hashed_reward(1)(completions=texts) != hashed_reward(2)(completions=texts)
