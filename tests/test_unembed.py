"""Laws of the reader of the unembedding: its logits are the model's own, or it refuses; it leaves no mark behind."""

import peft
import pytest
import torch
from torch import nn

import tiny
from forklora import unembed
from forklora.unembed import hidden_only, output_head, read_unembedding, unwrap
from tiny import HIDDEN, KINDS, VOCABULARY, HandingOn, Wrapper, close

IDS = torch.tensor([[1, 5, 3, 9, 2, 7], [4, 4, 0, 8, 6, 2]])


def lora(net):
    return peft.get_peft_model(net, peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))


WRAPPINGS = {
    "bare": lambda m: m,
    "ddp": Wrapper,
    "engine": HandingOn,
    "engine of peft": lambda m: HandingOn(lora(m)),
    "peft": lora,
    "ddp of peft": lambda m: Wrapper(lora(m)),
    "injected": lambda m: peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["mlp.down_proj", "c_fc"]), m),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_reader_s_logits_are_the_model_s_own(kind, dtype):
    net = tiny.model(kind, dtype=dtype)
    head = read_unembedding(net)
    with hidden_only(net) as caught, torch.no_grad():
        net(input_ids=IDS)
    close(head.logits(caught[0]), net(input_ids=IDS).logits.float().detach(), 1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_size_tie_and_rows_are_read_in_place(kind):
    net = tiny.model(kind)
    head = read_unembedding(net)
    assert (head.vocabulary, head.width) == (KINDS[kind][1]["vocab_size"], HIDDEN)
    assert head.weight.data_ptr() == net.get_output_embeddings().weight.data_ptr()
    assert head.tied == (net.get_input_embeddings().weight.data_ptr() == head.weight.data_ptr())
    assert head.tied == (kind in ("gpt2", "gemma2", "cohere"))


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "gemma2"])
def test_an_output_vector_is_the_derivative_of_its_logit(kind):
    net = tiny.model(kind)
    hidden = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1))
    jacobian = torch.autograd.functional.jacobian(
        lambda h: net.get_output_embeddings()(h) * read_unembedding(net).scale, hidden
    )
    close(read_unembedding(net).rows(torch.tensor([7, 0, 7])), jacobian[[7, 0, 7]])


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_wrapper_changes_nothing(kind, wrapping):
    bare = tiny.model(kind)
    wrapped = WRAPPINGS[wrapping](bare)
    assert unwrap(wrapped) is bare
    assert read_unembedding(wrapped).head is bare.get_output_embeddings()


def test_only_real_tokens_may_create_directions():
    net = tiny.model("padded")
    with torch.no_grad():
        net.lm_head.weight[3] = 0
    assert read_unembedding(net).valid_ids.tolist() == [i for i in range(VOCABULARY + 4) if i != 3]
    assert read_unembedding(net, tiny.tokenizer()).valid_ids.tolist() == [i for i in range(VOCABULARY) if i != 3]


REFUSED = {
    "no output embedding": lambda m: m.model,
    "carries an adapter": lambda m: peft.get_peft_model(m, peft.LoraConfig(target_modules=["lm_head"])),
    "trained copy": lambda m: peft.get_peft_model(
        m, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    ),
    "trained rows": lambda m: peft.get_peft_model(
        m, peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices={"lm_head": [1, 2]})
    ),
}


@pytest.mark.parametrize("says", REFUSED)
def test_a_head_that_cannot_be_read_is_refused_by_name(says):
    wrapped = REFUSED[says](tiny.model())
    for net in (wrapped, Wrapper(wrapped)):
        with pytest.raises(ValueError, match=says):
            read_unembedding(net)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", ["scale", "cap", "norm"])
def test_what_the_configuration_does_not_name_is_refused(hidden, dtype):
    change = {
        "scale": lambda z: 1.1 * z,
        "cap": lambda z: 2 * torch.tanh(z / 2),
        "norm": lambda z: z - z.mean(-1, True),
    }
    net = tiny.model(dtype=dtype)
    net.lm_head.register_forward_hook(lambda _, __, out: change[hidden](out))
    with pytest.raises(ValueError, match="hides a scale, a cap or a norm"):
        read_unembedding(net)
    assert read_unembedding(net, check=False).scale == 1


@pytest.mark.parametrize("broken", [False, True])
def test_reading_leaves_no_hook_and_no_mode_behind(broken):
    net = tiny.model().train()
    net.model.layers[0].eval()
    net.lm_head.register_forward_hook(lambda _, __, out: out * (2 if broken else 1))
    before = [(m.training, dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in net.modules()]
    try:
        read_unembedding(net)
    except ValueError:
        assert broken
    assert before == [(m.training, dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in net.modules()]


@pytest.mark.parametrize("own_forward", [False, True])
def test_the_head_comes_back_on_errors(own_forward):
    net = tiny.model()
    if own_forward:  # as accelerate's hooks do
        whole = net.lm_head.forward
        net.lm_head.forward = lambda hidden: 2 * whole(hidden)
    before, kept = net(input_ids=IDS).logits, dict(net.lm_head.__dict__)
    with pytest.raises(KeyError), hidden_only(net) as caught:
        assert net(input_ids=IDS).logits.shape == (2, 6, 0)
        assert caught[0].shape == (2, 6, HIDDEN)
        raise KeyError
    assert net.lm_head.__dict__ == kept
    assert torch.equal(before, net(input_ids=IDS).logits)


def test_the_wrapper_is_the_one_that_is_called():
    called, net = [], Wrapper(tiny.model())
    net.register_forward_hook(lambda *_: called.append("wrapper"))
    with hidden_only(net) as caught:
        net(input_ids=IDS)
    assert called == ["wrapper"] and len(caught) == 1


def exact_signal(net, hidden, *, mu, tokens):
    """delta and E|delta|^2 in float64, by autograd through the model's own map from hidden state to logits."""
    head = read_unembedding(net, check=False)
    jacobian = torch.stack([torch.autograd.functional.jacobian(head.logits, h) for h in hidden]).double()
    centered = jacobian - torch.einsum("nv,nvd->nd", mu, jacobian)[:, None]
    spread = (mu * centered.square().sum(-1)).sum(-1)
    return centered[torch.arange(len(tokens)), tokens], spread


@pytest.mark.parametrize("chunk", [1 << 26, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_the_signal_is_the_derivative_of_the_centered_logit_and_the_spread_its_expected_square(
    kind, chunk, monkeypatch
):
    monkeypatch.setattr(unembed, "_CHUNK", chunk)
    net, generator = tiny.model(kind), torch.Generator().manual_seed(3)
    head = read_unembedding(net)
    hidden = torch.randn(6, HIDDEN, generator=generator)
    logits = head.logits(hidden).detach()
    mu = (1.3 * logits).softmax(-1)
    mu[:3, ::2] = 0
    mu = mu / mu.sum(-1, keepdim=True)
    tokens = mu.multinomial(1, generator=generator)[:, 0]
    delta, spread = head.signal(mu, tokens, logits=logits)
    expected, size = exact_signal(net, hidden, mu=mu.double(), tokens=tokens)
    close(delta, expected)
    close(spread / size, torch.ones(6))
    every = torch.stack([head.signal(mu, torch.full((6,), a), logits=logits)[0] for a in range(head.vocabulary)], 1)
    close((mu * every.square().sum(-1)).sum(-1) / spread, torch.ones(6))


@pytest.mark.parametrize("offset", [0.0, 3.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("unsure", [1e-2, 1e-6, 1e-12])
def test_where_the_sampler_is_sure_signal_and_spread_stay_accurate(unsure, dtype, tolerance, offset):
    head = nn.Linear(64, 300, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.randn(300, 64, generator=torch.Generator().manual_seed(5)) + offset)
    head = head.to(dtype)
    read = unembed.Unembedding(head, 1.5, None, False, torch.arange(300))
    tail = torch.rand(8, 299, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    mu = torch.cat([torch.ones(8, 1), unsure * tail / tail.sum(-1, keepdim=True)], 1).float()
    rows, exact = 1.5 * head.weight.detach().double(), mu.double()
    rest = exact[:, 1:]
    moved = rows[1:] - rows[0]  # about the likeliest token, where float64 itself does not cancel
    shift = rest @ moved
    spread = (rest * moved.square().sum(-1)).sum(-1) - shift.square().sum(-1)
    for token in (0, 9):
        delta, found = read.signal(mu, torch.full((8,), token), logits=torch.zeros_like(mu))
        close(delta, rows[token] - rows[0] - shift, tolerance)
        close(found / spread, torch.ones(8), tolerance)


def test_a_signal_is_bounded_by_the_sampler_s_doubt():
    net = tiny.model()
    head, generator = read_unembedding(net), torch.Generator().manual_seed(8)
    logits = 4 * torch.randn(50, VOCABULARY, generator=generator)
    mu = logits.softmax(-1)
    _, spread = head.signal(mu, mu.argmax(-1), logits=logits)
    rows = head.rows(torch.arange(VOCABULARY))
    about_top = (mu * (rows - rows[mu.argmax(-1)][:, None]).square().sum(-1)).sum(-1)
    bound = 4 * rows.square().sum(-1).max() * (1 - mu.max(-1).values)
    assert (spread <= about_top * (1 + 1e-5)).all() and (about_top <= bound * (1 + 1e-5)).all()


def test_output_head_of_a_plain_module_names_the_way_out():
    with pytest.raises(ValueError, match="Linear has no output embedding.*AutoModelForCausalLM"):
        output_head(nn.Linear(2, 2))
