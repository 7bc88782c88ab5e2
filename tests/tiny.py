"""Tiny causal models of every kind the readers must know, all with random weights, and a tokenizer for them.

`model(kind)` builds one of KINDS: `llama`, `gpt2` (Conv1D, absolute positions, LayerNorm, tied), `gemma2` (soft cap,
norm gain 1 + w, sliding window shorter than the prompts, tied), `granite` (logits divided), `cohere` (logits scaled,
parallel blocks, tied), `qwen2` (biases in attention), `phi` (bias on the head), `padded` (rows beyond the
tokenizer), or of RECURRENT.
"""

from collections.abc import Sequence

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn

WORDS = [*"abcdefghij", "\n", "a\n", "bc"]
VOCABULARY, HIDDEN = len(WORDS), 16
NEWLINE = WORDS.index("\n")

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_GPT2 = {"n_embd": HIDDEN, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": VOCABULARY}
_GEMMA2 = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4, "attn_logit_softcapping": 5.0}
_TIED = {"tie_word_embeddings": True}
KINDS = {
    "llama": (hf.LlamaConfig, _SHAPE),
    "gpt2": (hf.GPT2Config, _GPT2 | {"bos_token_id": None, "eos_token_id": None}),
    "gemma2": (hf.Gemma2Config, _SHAPE | _TIED | _GEMMA2 | {"final_logit_softcapping": 3.0}),
    "granite": (hf.GraniteConfig, _SHAPE | {"logits_scaling": 2.5, "residual_multiplier": 0.8}),
    "cohere": (hf.CohereConfig, _SHAPE | _TIED | {"logit_scale": 0.7}),
    "qwen2": (hf.Qwen2Config, _SHAPE),
    "phi": (hf.PhiConfig, _SHAPE | {"num_key_value_heads": 2}),
    "padded": (hf.LlamaConfig, _SHAPE | {"vocab_size": VOCABULARY + 4}),
}

_RECURRENT = {k: v for k, v in _SHAPE.items() if k in ("vocab_size", "hidden_size", "num_hidden_layers")} | {
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# Models whose prompts cannot be run once for a group: a state instead of keys and values, in all layers or in some.
RECURRENT = {
    "mamba": (hf.MambaConfig, _RECURRENT | {"state_size": 4}),
    "lfm2": (hf.Lfm2Config, _SHAPE | {"layer_types": ["conv", "full_attention"]}),
}


def model(kind="llama", *, seed=0, dtype=torch.float32, sharpness=0.6, **changes):
    """A random model of one kind, in evaluation mode; `sharpness` is the size of the head's entries.

    Every weight is far from its usual start (gains not one, biases not zero), so that nothing holds by accident. The
    global random state is as before.
    """
    configuration, settings = (KINDS | RECURRENT)[kind]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        found = hf.AutoModelForCausalLM.from_config(configuration(**{**settings, **changes})).eval()
    generator = torch.Generator().manual_seed(seed)
    heads = {id(found.get_output_embeddings().weight), id(found.get_input_embeddings().weight)}
    with torch.no_grad():
        for weight in found.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if id(weight) in heads:
                weight.copy_(sharpness * noise)
            elif weight.dim() == 1:
                weight.add_(0.3 * noise)
            else:
                weight.copy_(1.5 * noise / weight.shape[-1] ** 0.5)
    return found.to(dtype)


def tokenizer(words: Sequence[str] = WORDS):
    """A fast tokenizer whose token `i` is the text `words[i]`; texts are split into single letters."""
    found = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    found.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    found.decoder = decoders.Fuse()
    return hf.PreTrainedTokenizerFast(tokenizer_object=found)


def prompts(lengths: Sequence[int], seed=0):
    """Random token lists of the given lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def alone(net, trace, row):
    """Hidden states and logits that predict each token of one row: whole row in one plain call, without padding."""
    prompt = trace.prompt_ids[row][trace.prompt_mask[row]]
    ids = torch.cat([prompt, trace.completion_ids[row][trace.completion_mask[row]]])[None]
    caught = []
    handle = net.get_output_embeddings().register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    logits = net(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    handle.remove()
    return caught[0][0, len(prompt) - 1 : -1], logits


def gradients(net, loss):
    """Gradient of a scalar by all parameters, as one float64 vector; None counts as zero."""
    weights = [p for p in net.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).double().flatten() for g, p in zip(found, weights, strict=True)]
    )


def close(found, expected, tolerance=1e-5):
    """The largest difference is below `tolerance` times the largest expected number."""
    gap, size = (found.double() - expected.double()).abs().max(), expected.double().abs().max()
    assert gap <= tolerance * size, f"differs by {gap:.3g}, the largest number is {size:.3g}"


class Wrapper(nn.Module):
    """Holds a model the way DistributedDataParallel and DeepSpeedEngine do."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


class HandingOn(Wrapper):
    """A wrapper that hands on whatever it is asked for, as DeepSpeedEngine does."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)
