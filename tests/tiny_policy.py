"""Tiny real policies: a character tokenizer, a two-layer Llama, a GPT-2 with its transposed weights, random bases.

What the tests of the adapter, the trainer and the recipes share. Nothing here is large enough to know anything; the
models are random, with weights large enough that their distributions are neither flat nor certain.
"""

import functools
import hashlib

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from forklora.adapter import KINDS, ForkLoraConfig, add_fork_lora, target_layers
from forklora.backward import layer_shape

SPECIAL = ("<pad>", "<eos>", "<unk>")
CHARACTERS = "\n 0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQ.,:*=+"
TEMPLATE = "{{ mood or '' }}{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '\n' }}{% endfor %}{{ 'a:' }}"
LAYERS = 14  # linear layers of the Llama: seven in each of two blocks
FORMS = [(kind, trained) for kind in KINDS for trained in (False, True)]


@functools.cache
def tokenizer():
    """One token per character; 64 tokens in all with padding, end and unknown."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", "padding_side": "left"}
    options = {"chat_template": TEMPLATE, "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special, **options)


def llama(*, seed=0, dtype=torch.float32, tied=True, width=32, heads=2):
    """A two-layer Llama in evaluation mode; the global random state is left alone."""
    config = LlamaConfig(
        vocab_size=len(tokenizer()), hidden_size=width, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=heads, max_position_embeddings=256, initializer_range=0.2,
        tie_word_embeddings=tied, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).to(dtype).eval()


def gpt2(*, seed=0):
    """A two-layer GPT-2 of width 32: Conv1D layers, whose weights are stored the other way round."""
    config = GPT2Config(
        vocab_size=len(tokenizer()), n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.2,
        bos_token_id=1, eos_token_id=1, pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return GPT2LMHeadModel(config).eval()


def orthonormal(size, count, *, seed=0):
    """``[size, count]`` with orthonormal columns."""
    draw = torch.randn(size, count, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(draw).Q


def random_bases(model, *, width=8, seed=0, targets="all-linear"):
    """Output and input directions of every target layer, as many as fit."""
    modules, found = dict(model.named_modules()), {}
    for i, name in enumerate(target_layers(model, ForkLoraConfig(target_modules=targets))):
        d_out, d_in = layer_shape(modules[name])
        sides = ((d_out, 2 * i), (d_in, 2 * i + 1))
        found[name] = tuple(orthonormal(d, min(width, d), seed=seed + place) for d, place in sides)
    return found


def settings(kind, *, r=2, width=4, **options):
    """Arguments of a ``ForkLoraConfig`` of this kind; ``width`` is left out where the kind has none."""
    return {"kind": kind, "r": r, **({"width": width} if kind in ("core", "block") else {}), **options}


def adapted(kind, *, model=None, bases=None, **options):
    """A model with a fork adapter of this kind, and the bases it was given."""
    model = llama() if model is None else model
    bases = random_bases(model) if bases is None else bases
    return add_fork_lora(model, ForkLoraConfig(**settings(kind, **options)), bases), bases


def tokens(*, rows=3, length=9, seed=1):
    """Random token ids ``[rows, length]`` without special tokens."""
    size = len(tokenizer())
    return torch.randint(3, size, (rows, length), generator=torch.Generator().manual_seed(seed))


def logits(model, ids=None):
    """Logits of a batch of tokens, without gradients."""
    with torch.no_grad():
        return model(tokens() if ids is None else ids).logits


def loss_of(model, ids=None):
    """A next-token loss in which every layer has a say."""
    ids = tokens() if ids is None else ids
    return nn.functional.cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def train(model, *, steps=3, optimizer=torch.optim.SGD, **options):
    """A few real steps on whatever the model declares trainable."""
    chosen = optimizer([p for p in model.parameters() if p.requires_grad], **({"lr": 0.1} | options))
    for step in range(steps):
        chosen.zero_grad()
        loss_of(model, tokens(seed=step)).backward()
        chosen.step()
    return model


def shake(model, *, seed=5, size=0.3):
    """Random values in everything trainable, as if training had gone far."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn(parameter.shape, generator=generator).to(parameter))
    return model


def trainable(model, adapter="default"):
    """Short names of what asks for a gradient, without the adapter's own name: ``lora_A.weight`` and so on."""
    short = {n.partition("lora_")[2] for n, p in model.named_parameters() if p.requires_grad}
    return {f"lora_{name.replace(f'.{adapter}.', '.')}" for name in short}


def fingerprints(model):
    """Hash of each tensor of the base, under the name it has in a bare model."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {
        name.replace("base_model.model.", "").replace("base_layer.", ""): hashlib.sha256(
            tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for name, tensor in named
        if "lora_" not in name
    }


def deltas(model, adapter="default"):
    """``dW`` of every adapted layer in the layout ``[d_out, d_in]``, by the base's name of the layer."""
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "get_delta_weight") and adapter in module.lora_A:
            delta = module.get_delta_weight(adapter).detach()
            found[name.replace("base_model.model.", "")] = delta.T if module.fan_in_fan_out else delta
    return found


def prompts(*, count=8, chat=False):
    """A data set of short prompts, as text or as conversations."""
    texts = [f"{a} * {b} =" for a in range(2, 7) for b in range(2, 7)][:count]
    wrapped = [[{"role": "user", "content": text}] for text in texts]
    return Dataset.from_dict({"prompt": wrapped if chat else texts})


def shorter(completion_ids, **_):
    """Reward for short completions."""
    return [-0.25 * len(ids) for ids in completion_ids]


def letters(completions, **_):
    """Reward for lower-case letters; conversations are scored by their last message."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [sum(map(str.islower, text)) / 8 for text in texts]


def eager(model, *, by=1.8):
    """The model with a likelier end of text, so that completions differ in length from the first step on."""
    ending = model.lm_head.weight
    with torch.no_grad():
        direction = model(tokens(rows=16), output_hidden_states=True).hidden_states[-1].flatten(0, 1).mean(0)
        ending[1] += by * direction / direction.square().sum()
    return model


def guessing(model):
    """The model with likelier zeros and newlines, so that some answers are right and some are not."""
    with torch.no_grad():
        direction = model(tokens(rows=16), output_hidden_states=True).hidden_states[-1].flatten(0, 1).mean(0)
        for text in "0\n":
            model.lm_head.weight[tokenizer()(text)["input_ids"][0]] += 4 * direction / direction.square().sum()
    return model


def trainer_of(folder, *, kind="span", reward=shorter, moved=False, bases=None, **options):
    """A real trainer on a tiny policy, with the adapter shaken out of its start where ``moved``."""
    from forklora.trainers.rl import ForkGRPOConfig, ForkGRPOTrainer

    model = eager(llama(tied=False))
    given = {name: options.pop(name) for name in ("lora_alpha",) if name in options}
    config = ForkLoraConfig(**settings(kind, bases=random_bases(model) if bases else None, **given))
    extra = {n: options.pop(n) for n in ("peft_config", "train_dataset", "eval_dataset") if n in options}
    chosen = {
        "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8, "basis_prompts": 8,
        "max_steps": 1, "use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no", "logging_steps": 1,
        "disable_tqdm": True, "seed": 3, "lr_scheduler_type": "constant",
    }  # fmt: skip
    args = ForkGRPOConfig(str(folder), **(chosen | options))
    given = {"peft_config": config, "train_dataset": prompts()} | extra
    trainer = ForkGRPOTrainer(model, reward, args, processing_class=tokenizer(), **given)
    # what the training loop sets when it begins
    trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
    if moved:
        shake(trainer.model, size=0.05)
    return trainer


def gradients(model, loss):
    """Gradients of everything trainable."""
    return torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])


def recipe_of(folder, *, policy=None, **changes):
    """A recipe of two arms and two steps on a tiny saved policy; the model is saved on first use."""
    from forklora.recipes.config import Recipe

    model = folder / "model"
    if not model.exists():
        (policy or eager(llama(tied=False))).save_pretrained(model)
        tokenizer().save_pretrained(model)
    content = {
        "name": "tiny", "description": "Two arms, two steps.", "model": {"name": str(model), "dtype": "float32"},
        "task": {"name": "multiplication", "options": {}},
        "sampling": {"max_new_tokens": 5, "stop": ["\n"]}, "prompts": 2, "group": 4, "steps": 2, "target": 1.0,
        "evaluation": {"every": 1, "prompts": 3, "samples": 2}, "forks": {"prompts": 4, "seed": 0},
        "arms": [
            {"name": "block", "adapter": "block", "rank": 2, "width": 3, "alpha": 2.0, "rate": 0.1},
            {"name": "plain", "adapter": "lora", "alpha": 1.0, "optimizer": "adamw", "rate": 0.01, "centering": "none"},
        ],
        "output": str(folder / "run"),
    }  # fmt: skip
    return Recipe.model_validate(content | changes)
