"""Laws of the shared forward pass: hidden states and gradients are those of each row alone, in one plain call."""

import pytest
import torch

import tiny
from forklora.forward import Calls, completion_hidden
from forklora.rollouts import Sampler, pad_prompts, sample
from tiny import HIDDEN, KINDS, RECURRENT, Wrapper, close, gradients


def rows_of(net, *, lengths=(1, 6, 3), group=2, order=None, longest=5):
    """Rollouts of prompts of several lengths, in a given order of rows; some end early."""
    torch.manual_seed(0)
    sampler = Sampler(max_new_tokens=longest, stop_ids=(2, 5, 7, 9))
    trace = sample(net, tiny.prompts(lengths), sampler=sampler, group=group)
    return trace.select(range(len(trace)) if order is None else order)


def together(net, trace):
    return completion_hidden(
        net,
        trace.prompt_ids,
        prompt_mask=trace.prompt_mask,
        completion_ids=trace.completion_ids,
        completion_mask=trace.completion_mask,
    )


def loss_of(hidden, seed):
    """A fixed random linear function of one row's hidden states ``[t, d]``."""
    return (hidden * torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(seed))[: len(hidden)]).sum()


@pytest.mark.parametrize("wrap", [lambda m: m, Wrapper], ids=["bare", "ddp"])
@pytest.mark.parametrize("kind", [*KINDS, *RECURRENT])
def test_hidden_states_and_gradients_are_those_of_each_row_alone(kind, wrap):
    net = tiny.model(kind)
    trace = rows_of(net, order=[4, 0, 3, 1, 5, 2])
    lengths = trace.completion_mask.sum(1).tolist()
    assert len(set(lengths)) > 1
    hidden = together(wrap(net), trace)
    apart = [tiny.alone(net, trace, row)[0] for row in range(len(trace))]
    for row, expected in enumerate(apart):
        close(hidden[row, : lengths[row]], expected)
    loss = sum(loss_of(hidden[row, :n], row) for row, n in enumerate(lengths))
    close(gradients(net, loss), gradients(net, sum(loss_of(h, row) for row, h in enumerate(apart))), 1e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
def test_sharing_a_prompt_and_not_sharing_it_give_the_same(kind):
    net = tiny.model(kind, **({"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0} if kind == "gpt2" else {}))
    trace = rows_of(net, group=3)
    mask = trace.completion_mask
    shared = together(net, trace)
    net.gradient_checkpointing_enable()
    net.train()
    assert not Calls.of(net).shares_prompt
    unshared = together(net, trace)
    close(unshared[mask], shared[mask])
    close(gradients(net, loss_of(unshared[mask][:5], 0)), gradients(net, loss_of(shared[mask][:5], 0)), 1e-4)


def test_equal_prompts_run_once(monkeypatch):
    net = tiny.model()
    trace = rows_of(net, lengths=(4, 4, 2), group=3)
    seen = []
    net.model.register_forward_pre_hook(lambda _, __, kw: seen.append(tuple(kw["input_ids"].shape)), with_kwargs=True)
    together(net, trace)
    assert seen == [(3, 4), (9, trace.completion_ids.shape[1] - 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_one_token_completions_and_more_padding_change_nothing(kind):
    net = tiny.model(kind)
    trace = rows_of(net, longest=1)
    hidden = together(net, trace)
    assert hidden.shape == (6, 1, HIDDEN)
    ids, mask = pad_prompts([r[m].tolist() for r, m in zip(trace.prompt_ids, trace.prompt_mask, strict=True)], 7)
    ids, mask = torch.nn.functional.pad(ids, (3, 0), value=9), torch.nn.functional.pad(mask, (3, 0))
    filled = torch.nn.functional.pad(trace.completion_ids, (0, 2), value=1)
    found = completion_hidden(
        net,
        ids,
        prompt_mask=mask,
        completion_ids=filled,
        completion_mask=torch.nn.functional.pad(trace.completion_mask, (0, 2)),
    )
    close(found[:, :1], hidden)


def test_prompts_that_differ_in_padding_only_are_told_apart():
    """The pad is a real token: the same numbers are another prompt under another mask."""
    net = tiny.model()
    ids, mask = torch.tensor([[2, 2, 4]] * 3), torch.tensor([[False, False, True], [True] * 3, [False, True, True]])
    completion = torch.tensor([[1, 3]] * 3)
    hidden = completion_hidden(
        net, ids, prompt_mask=mask, completion_ids=completion, completion_mask=torch.ones_like(completion).bool()
    )
    for row in range(3):
        whole = torch.cat([ids[row][mask[row]], completion[row]])[None]
        expected = net.model(input_ids=whole).last_hidden_state[0, -3:-1]
        close(hidden[row], expected)
