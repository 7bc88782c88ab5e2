"""What every cell of `forklora stages` is given: a tiny random policy in a folder, its bases, prompts and a reward."""

import functools
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from forklora.recipes.bench_inputs import exact_prompts, word_tokenizer
from forklora.recipes.stages_plan import ADAPTERS, COMPLETION, GROUP, PROMPTS, STEPS
from forklora.recipes.zero import deepspeed_settings
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from forklora.adapter import ForkLoraConfig
from forklora.bases import BasisConfig, collect_bases
from forklora.rollouts import Sampler

VOCABULARY, END = 64, 2
_LENGTHS = (3, 6, 4, 5)  # tokens of a step's prompts: rows of a batch are padded
_SIDES = ("output", "input")


def prepare_inputs(folder: Path) -> None:
    """Write ``model/`` (float32 weights and tokenizer) and ``bases.safetensors``, from fixed seeds."""
    model, words = _policy(), tokenizer()
    model.save_pretrained(folder / "model")
    words.save_pretrained(folder / "model")
    width = {side: max(getattr(ForkLoraConfig(**a), f"{side}_width") for a in ADAPTERS.values()) for side in _SIDES}
    config = BasisConfig(**width, group=GROUP, progress=False)
    sampler = Sampler(max_new_tokens=COMPLETION, stop_ids=(END,))
    collect_bases(model, words, prompts()["prompt"], config=config, sampler=sampler).save(folder / "bases.safetensors")


def _policy() -> LlamaForCausalLM:
    """Weights large enough that its distributions are neither flat nor certain."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    ids = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": 0}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ids, initializer_range=0.15)).eval()


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word; the word of id 2 ends a completion."""
    found = word_tokenizer(VOCABULARY)
    found.add_special_tokens({"eos_token": f"w{END}"})
    return found


@functools.cache
def prompts() -> Dataset:
    """As many prompts as the steps take, of different lengths."""
    count = STEPS + 1
    texts = [exact_prompts(tokenizer(), length=length, count=count, seed=length) for length in _LENGTHS]
    return Dataset.from_dict({"prompt": [texts[i % PROMPTS][i // PROMPTS] for i in range(PROMPTS * count)]})


def low_words(completion_ids: list[list[int]], **_: object) -> list[float]:
    """Reward: tokens of the first half of the vocabulary, as a share of the longest completion."""
    return [sum(token < VOCABULARY // 2 for token in ids) / COMPLETION for ids in completion_ids]


def deepspeed_config(stage: str) -> dict[str, Any] | None:
    """The shipped configuration of a stage; at stage 3 every parameter is partitioned, however small."""
    if stage == "none":
        return None
    found = deepspeed_settings(f"zero{stage}")
    if stage == "3":
        found["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return found
