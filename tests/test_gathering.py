"""Laws of ZeRO-3: a model in pieces is read, collected from and adapted as if it were whole, on every rank alike."""

import pytest
import torch

import tiny
from forklora.adapter import ForkLoraConfig, add_fork_lora, target_layers
from forklora.backward import layer_shape, linear_layers
from forklora.bases import BasisConfig, collect_bases, identity_span
from forklora.export import plain_lora
from forklora.forward import Calls
from forklora.gathering import callable_alone, fetched, kept_whole, partitioned
from forklora.rollouts import Sampler, sample
from forklora.unembed import read_unembedding
from ranks import configuration, together
from tiny_policy import FORMS, settings

pytest.importorskip("deepspeed")

SAMPLER = Sampler(max_new_tokens=4, stop_ids=(2, 7))
CONFIG = BasisConfig(output=4, input=4, group=4, batch=3, progress=False, seed=5)
PROMPTS = tiny.prompts((3, 5, 1, 4))
MODELS = ("llama", "gpt2")


def cut(net):
    """The model with every parameter in pieces, as one that was made under zero.Init."""
    from deepspeed import zero

    zero.Init(module=net, config_dict_or_path=configuration(3))
    return net


def loaded(folder):
    """The model as transformers loads it under ZeRO-3, before there is an engine."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    held = HfDeepSpeedConfig(configuration(3))  # it counts as long as it lives
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    del held
    return net


def same(one, other):
    """Whether two bases are equal in every bit."""
    parts = ("output", "output_values", "input", "input_values")
    return list(one) == list(other) and all(
        torch.equal(getattr(one[n], p), getattr(other[n], p)) for n in one for p in parts
    )


def adapters(make, bases):
    """Per form: the adapter's tensors as exported, its dtypes, and whether something of it is in pieces."""
    found = {}
    for kind, trained in FORMS:
        config = ForkLoraConfig(**settings(kind, width=3, train_basis=trained))
        model = add_fork_lora(make(), config, bases)
        ours = [p for n, p in model.named_parameters() if "lora_" in n]
        found[kind, trained] = (
            plain_lora(model)[1],
            {p.dtype for p in ours},
            any(map(partitioned, ours)),
            sum(p.numel() for p in ours if p.requires_grad),
        )
    return found


def equal_adapters(one, other):
    return all(
        one[form][1:] == other[form][1:]
        and one[form][0].keys() == other[form][0].keys()
        and all(torch.equal(one[form][0][key], other[form][0][key]) for key in one[form][0])
        for form in FORMS
    )


def read(folder):
    """What can be read off a model in pieces, compared with the whole model on the same rank."""
    found, rank = {}, torch.distributed.get_rank()
    for kind in MODELS:
        whole_net, net = tiny.model(kind), cut(tiny.model(kind)) if kind == "gpt2" else loaded(folder)
        found[f"{kind} in pieces"] = all(map(partitioned, net.parameters())) and not fetched(net)
        hidden = torch.randn(3, tiny.HIDDEN, generator=torch.Generator().manual_seed(0))
        one, other = read_unembedding(whole_net), read_unembedding(net)
        found[f"{kind} head"] = bool(
            torch.equal(one.logits(hidden), other.logits(hidden))
            and torch.equal(one.squared_norms(), other.squared_norms())
            and (one.width, one.vocabulary, one.tied) == (other.width, other.vocabulary, other.tied)
        )
        modules, names = dict(net.named_modules()), linear_layers(whole_net)
        plain = dict(whole_net.named_modules())
        found[f"{kind} shapes"] = all(layer_shape(modules[n]) == layer_shape(plain[n]) for n in names)
        found[f"{kind} targets"] = target_layers(net, ForkLoraConfig()) == target_layers(whole_net, ForkLoraConfig())
        share = PROMPTS[rank:] if rank else PROMPTS[:1]
        bases, expected = (
            collect_bases(m, tiny.tokenizer(), share, config=CONFIG, sampler=SAMPLER) for m in (net, whole_net)
        )
        found[f"{kind} bases"] = same(bases, expected)
        torch.manual_seed(rank)
        trace = sample(whole_net, share, sampler=SAMPLER, group=2)
        spans = [identity_span(m, [trace], output=2) for m in (net, whole_net)]
        found[f"{kind} span"] = all(torch.equal(spans[0][n], spans[1][n]) for n in spans[1])
        found[f"{kind} alone"] = Calls.of(net).shares_prompt
        with callable_alone(net):
            found[f"{kind} together"] = Calls.of(net).shares_prompt
        found[f"{kind} in pieces again"] = all(map(partitioned, net.parameters()))
        found[f"{kind} adapters"] = equal_adapters(
            adapters(lambda kind=kind: cut(tiny.model(kind)), bases),
            adapters(lambda kind=kind: tiny.model(kind), bases),
        )
    return found


def test_a_model_in_pieces_is_read_as_the_whole_one(tmp_path):
    tiny.model("llama").save_pretrained(tmp_path)
    for found in together(read, folder=str(tmp_path)):
        expected = dict.fromkeys(found, True) | {f"{kind} alone": False for kind in MODELS}
        assert found == expected


def made_inside():
    """Adapters made while the caller stands in zero.Init, as when a whole script is indented under it."""
    from deepspeed import zero

    plain = tiny.model()
    bases = collect_bases(plain, tiny.tokenizer(), PROMPTS, config=CONFIG, sampler=SAMPLER)
    expected, nets = adapters(tiny.model, bases), [cut(tiny.model()) for _ in FORMS]
    with zero.Init(config_dict_or_path=configuration(3)):
        with kept_whole():
            ordinary = torch.nn.Linear(3, 3)
        piece = torch.nn.Linear(3, 3)
        found = adapters(nets.pop, bases)
    return [not partitioned(ordinary.weight) and partitioned(piece.weight), equal_adapters(found, expected)]


@pytest.mark.slow
def test_an_adapter_made_inside_zero_init_is_filled_before_it_is_cut():
    assert together(made_inside) == [[True, True]] * 2
