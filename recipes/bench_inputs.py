"""What both sides of a benchmark are given: the policy, prompts of an exact length, rewards, and no early end.

The end-of-sequence token is a new one behind the tokenizer's last, which the model has no (or no trained) row for, so
that every completion has the length that was asked for.
"""

import hashlib
import random
from collections.abc import Callable
from typing import Any

import torch
from forklora.recipes.bench_plan import SideSpec
from forklora.recipes.demo import load_model
from forklora.recipes.refusal import Refusal
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|never drawn|>"
_CANDIDATES = 4_096  # token ids looked at for prompts
_TRIES = 100  # for each prompt
_FEWEST_WORDS = 64


def policy(spec: SideSpec) -> tuple[nn.Module, Any]:
    """Model and tokenizer of a side; neither will draw an end of sequence."""
    if spec.vocabulary is None:
        model, tokenizer = load_model(spec.model.name, spec.model.dtype)
    else:
        model, tokenizer = random_llama(spec.vocabulary, seed=spec.seed), word_tokenizer(spec.vocabulary)
    tokenizer.add_special_tokens({"eos_token": END})
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer


def random_llama(vocabulary: int, *, seed: int) -> nn.Module:
    """A small float32 Llama with random weights and an untied head of this many rows."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer of this many words, the padding token among them."""
    words = ["<pad>", *(f"w{place}" for place in range(1, vocabulary))]
    inner = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="w1"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", padding_side="left")


def exact_prompts(tokenizer: Any, *, length: int, count: int, seed: int) -> list[str]:  # noqa: ANN401
    """`count` different texts of exactly `length` tokens each, special tokens that the tokenizer adds included.

    Raises:
        Refusal: the tokenizer's own texts do not come back with that many tokens.
    """
    draw, found = random.Random(seed), dict[str, None]()
    pool = _round_trips(tokenizer, draw)
    for _ in range(count):
        tries = (_candidate(tokenizer, pool, length, draw) for _ in range(_TRIES))
        text = next((text for text in tries if text is not None and text not in found), None)
        if text is None:
            raise Refusal(
                f"cannot make {count} different prompts of exactly {length} tokens with this {type(tokenizer).__name__}"
                f" (it adds {len(tokenizer('')['input_ids'])} special tokens); choose a longer prompt or another model"
            )
        found[text] = None
    return list(found)


def _round_trips(tokenizer: Any, draw: random.Random) -> list[int]:  # noqa: ANN401
    """Ids whose text is that one token again; whole words if there are enough, since they do not merge."""
    ids = sorted(draw.sample(range(tokenizer.vocab_size), min(tokenizer.vocab_size, _CANDIDATES)))
    texts = {i: tokenizer.decode([i]) for i in ids if i not in tokenizer.all_special_ids}
    same = {i: t for i, t in texts.items() if tokenizer(t, add_special_tokens=False)["input_ids"] == [i]}
    words = [i for i, text in same.items() if text.startswith(" ") and text[1:].isalpha()]
    return words if len(words) >= _FEWEST_WORDS else list(same)


def _candidate(tokenizer: Any, pool: list[int], length: int, draw: random.Random) -> str | None:  # noqa: ANN401
    wanted = length - len(tokenizer("")["input_ids"])
    if wanted < 1 or not pool:
        return None
    text = tokenizer.decode(draw.choices(pool, k=wanted))
    return text if len(tokenizer(text)["input_ids"]) == length else None


def hashed_reward(seed: int) -> Callable[..., list[float]]:
    """A reward in [0, 1) from a hash of the completion's text: no two texts of a group score the same."""

    def reward(completions: list[str], **_: object) -> list[float]:
        hashes = (hashlib.sha256(f"{seed}:{text}".encode()).digest() for text in completions)
        return [int.from_bytes(found[:6], "big") / 2**48 for found in hashes]

    return reward
