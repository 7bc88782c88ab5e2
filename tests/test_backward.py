"""Laws of the backward pass over a trace: sums and gradients are those of plain passes over each row alone."""

from itertools import product

import pytest
import torch
from torch import nn

import tiny
from forklora.backward import (
    LayerSums,
    WeightGradients,
    backward,
    layer_shape,
    linear_layers,
    pseudo_advantages,
    residual_signal,
    residual_writers,
)
from forklora.rollouts import Sampler, sample
from tiny import HIDDEN, KINDS, Wrapper, close

ARCHITECTURES = ("llama", "gpt2", "gemma2", "phi", "cohere")


def rollouts(net, lengths=(1, 5, 3), group=2, order=None, **settings):
    torch.manual_seed(0)
    sampler = Sampler(**{"max_new_tokens": 4, "stop_ids": (2, 5, 7, 9)} | settings)
    trace = sample(net, tiny.prompts(lengths), sampler=sampler, group=group)
    trace.delta[~trace.completion_mask] = 1e3  # what stands at padding means nothing
    return trace.select(range(len(trace)) if order is None else order)


def signals(trace, seed=1):
    return torch.randn(len(trace), generator=torch.Generator().manual_seed(seed))


def row_by_row(net, trace, *, advantages, layers):
    """For each layer and each row: inputs ``x`` and output gradients ``g`` by position, one plain pass a row."""
    found = {name: [] for name in layers}
    modules = dict(net.named_modules())
    for row in range(len(trace)):
        seen = {}
        handles = [
            modules[name].register_forward_hook(
                lambda _, args, out, to=(seen, name): to[0].update({to[1]: (args[0], out)})
            )
            for name in layers
        ]
        hidden, _ = tiny.alone(net, trace, row)
        for handle in handles:
            handle.remove()
        loss = advantages[row] * (trace.delta[row][trace.completion_mask[row]] * hidden).sum()
        gradients = torch.autograd.grad(loss, [out for _, out in seen.values()])
        for (name, (x, _)), g in zip(seen.items(), gradients, strict=True):
            found[name].append((x[0].detach().double(), g[0].double()))
    return found


def merged(trace, rows):
    """A prompt that several rows share is a row of its own: its ``g`` is the sum of theirs."""
    groups = {}
    for row, (x, g) in enumerate(rows):
        n = int(trace.prompt_mask[row].sum())
        yield x[n:], g[n:]
        kept = groups.setdefault(int(trace.group[row]), [x[:n], torch.zeros_like(g[:n])])
        kept[1] += g[:n]
    yield from map(tuple, groups.values())


def dense_sums(trace, rows):
    """``sum G_i G_i^T`` and ``sum G_i^T G_i`` over all rows, ``G_i`` the weight gradient of one row."""
    gradients = [g.T @ x for x, g in merged(trace, rows)]
    return sum(m @ m.T for m in gradients), sum(m.T @ m for m in gradients)


def dense(sketch):
    """The matrix a sketch of full width holds, from its eigenpairs."""
    values = sketch.spectrum(sketch.size)
    values, vectors = sketch.eigenbasis(int((values > 1e-9 * values[0]).sum()))
    return vectors.double() * values @ vectors.double().T


@pytest.mark.parametrize("wrap", [lambda m: m, Wrapper], ids=["bare", "ddp"])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_sums_of_all_layers_are_those_of_plain_passes_over_each_row(kind, group, wrap):
    net = tiny.model(kind)
    trace = rollouts(net, group=group, order=torch.randperm(3 * group, generator=torch.Generator().manual_seed(2)))
    layers, advantages = linear_layers(net), signals(trace)
    sums = LayerSums(net, layers, hidden=HIDDEN, width=100, seed=0)
    sums.add(wrap(net), trace, advantages=advantages)
    rows = row_by_row(net, trace, advantages=advantages, layers=layers)
    for name in layers:
        for side, expected in zip(sums.sides[name], dense_sums(trace, rows[name]), strict=True):
            close(dense(side), expected, 1e-4)
            assert abs(side.trace / expected.trace() - 1) < 1e-4
    delta = trace.delta[trace.completion_mask].double()
    close(dense(sums.signal), delta.T @ delta)


def test_sums_add_up_over_traces_and_do_not_depend_on_order_or_padding():
    net = tiny.model()
    trace = rollouts(net)
    layers, advantages = linear_layers(net), signals(trace)
    whole, parts = (LayerSums(net, layers, hidden=HIDDEN, width=100, seed=0) for _ in range(2))
    whole.add(net, trace, advantages=advantages)
    for rows in ([5, 4], [1, 0], [2, 3]):
        parts.add(net, trace.select(rows), advantages=advantages[rows])
    for name, side in product(layers, (0, 1)):
        close(dense(parts.sides[name][side]), dense(whole.sides[name][side]), 1e-4)


def test_sharing_a_prompt_changes_no_sum_in_expectation():
    """All pairs of one-token rollouts of one prompt, signals +1 and -1: the mean sum is that of separate rows."""
    net = tiny.model()
    trace = rollouts(net, lengths=(4,), group=200, max_new_tokens=1, top_k=3)
    first = {token: row for row, token in reversed(list(enumerate(trace.completion_ids[:, 0].tolist())))}
    rows, mu = list(first.values()), trace.logprob[list(first.values()), 0].exp()
    assert abs(mu.sum() - 1) < 1e-5 and len(rows) == 3
    layers = linear_layers(net)
    shared, apart = (LayerSums(net, layers, hidden=HIDDEN, width=100, seed=0) for _ in range(2))
    for (i, p), (j, q) in product(zip(rows, mu, strict=True), repeat=2):
        signs = (p * q).sqrt() * torch.tensor([1.0, -1.0])
        shared.add(net, trace.select([i, j]), advantages=signs)
        for row, sign in zip((i, j), signs, strict=True):
            apart.add(net, trace.select([row]), advantages=sign[None])
    for name, side in product(layers, (0, 1)):
        close(dense(shared.sides[name][side]), dense(apart.sides[name][side]), 1e-3)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_weight_gradients_are_autograd_s(kind):
    net = tiny.model(kind)
    trace = rollouts(net, group=3, order=[3, 0, 8, 1, 7, 2, 6, 5, 4])
    layers, advantages = linear_layers(net), signals(trace)
    found = WeightGradients(net, layers)
    halves = torch.arange(9) < 4
    for rows in (halves, ~halves):
        found.add(net, trace.select(rows), advantages=advantages[rows])
    loss = sum(
        a * (trace.delta[row][trace.completion_mask[row]] * tiny.alone(net, trace, row)[0]).sum()
        for row, a in enumerate(advantages)
    )
    weights = [net.get_submodule(name).weight for name in layers]
    for name, gradient in zip(layers, torch.autograd.grad(loss, weights), strict=True):
        close(found.sums[name], gradient.T if kind == "gpt2" else gradient, 1e-4)


def final_norm(net):
    return next(
        m for name, m in net.named_modules() if name in ("model.norm", "transformer.ln_f", "model.final_layernorm")
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_signal_past_the_final_norm_is_autograd_s(kind):
    net = tiny.model(kind)
    trace, expected, streams = rollouts(net), [], []
    handle = final_norm(net).register_forward_hook(lambda _, args, __: streams.append(args[0]))
    for row in range(len(trace)):
        hidden, _ = tiny.alone(net, trace, row)
        loss = (trace.delta[row][trace.completion_mask[row]] * hidden).sum()
        gradient = torch.autograd.grad(loss, streams[-1])[0][0]
        expected.append(gradient[int(trace.prompt_mask[row].sum()) - 1 : -1])
    handle.remove()
    close(residual_signal(net, trace), torch.cat(expected), 1e-4)


def test_for_an_rms_norm_it_is_the_closed_formula():
    net = tiny.model("llama", rms_norm_eps=0.0)
    trace, formula = rollouts(net), []
    for row in range(len(trace)):
        caught = []
        handle = net.model.norm.register_forward_hook(lambda _, args, __, caught=caught: caught.append(args[0][0]))
        tiny.alone(net, trace, row)
        handle.remove()
        r = caught[0][int(trace.prompt_mask[row].sum()) - 1 : -1].detach()
        unit = r / r.norm(dim=-1, keepdim=True)
        carried = net.model.norm.weight.detach() * trace.delta[row][trace.completion_mask[row]]
        tangent = carried - unit * (unit * carried).sum(-1, keepdim=True)
        formula.append(tangent / r.square().mean(-1, keepdim=True).sqrt())
    close(residual_signal(net, trace), torch.cat(formula), 1e-4)


def test_a_head_that_no_norm_feeds_is_refused_and_no_hook_stays():
    net = tiny.model()
    trace = rollouts(net)
    net.model.norm = nn.Identity()
    with pytest.raises(ValueError, match="head of LlamaForCausalLM is not fed by a norm"):
        residual_signal(net, trace)
    assert not any(m._forward_hooks for m in net.modules())


def test_a_trace_without_signal_says_how_to_get_one():
    net = tiny.model()
    trace = rollouts(net).without_delta()
    for act in (lambda: backward(net, trace, advantages=signals(trace)), lambda: residual_signal(net, trace)):
        with pytest.raises(ValueError, match="sample it with record=True"):
            act()


@pytest.mark.parametrize("breaks", [False, True])
def test_a_backward_pass_leaves_no_mark(breaks):
    net = tiny.model(attention_dropout=0.5).train()
    trace = rollouts(net)
    net.model.layers[1].eval()
    net.model.layers[0].mlp.requires_grad_(False)
    net.lm_head.weight.grad = torch.ones_like(net.lm_head.weight)
    weights = [p.detach().clone() for p in net.parameters()]

    def state():
        hooks = [(dict(m._forward_hooks), dict(m._forward_pre_hooks), m.training) for m in net.modules()]
        return hooks, [p.requires_grad for p in net.parameters()], [p.grad is None for p in net.parameters()]

    before = state()
    sums = LayerSums(net, linear_layers(net), hidden=HIDDEN, width=100, seed=0)
    if breaks:
        trace.delta[0, 0] = torch.nan
        sums._add = lambda *_: (_ for _ in ()).throw(RuntimeError("inside the backward pass"))
        with pytest.raises(RuntimeError, match="inside"):
            sums.add(net, trace, advantages=signals(trace))
    else:
        sums.add(net, trace, advantages=signals(trace))
    assert state() == before
    assert all(torch.equal(p, w) for p, w in zip(net.parameters(), weights, strict=True))
    assert (net.lm_head.weight.grad == 1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_linear_layers_are_all_but_the_head_and_writers_write_into_the_stream(kind):
    net = tiny.model(kind)
    layers, modules = linear_layers(net), dict(net.named_modules())
    flat = [n for n, m in modules.items() if isinstance(m, nn.Linear) or "Conv1D" in type(m).__name__]
    assert set(flat) - set(layers) == {n for n, m in modules.items() if m is net.get_output_embeddings()}
    for name in layers:
        x = torch.zeros(1, layer_shape(modules[name])[1])
        assert modules[name](x).shape[1] == layer_shape(modules[name])[0]
    ends = {"gpt2": ("attn.c_proj", "mlp.c_proj"), "phi": ("dense", "fc2")}.get(kind, ("o_proj", "down_proj"))
    assert residual_writers(net, HIDDEN) == [n for n in layers if n.endswith(ends)]


def test_an_unknown_layer_is_named():
    with pytest.raises(ValueError, match=r"no layers named model\.layers\.7"):
        LayerSums(tiny.model(), ["model.layers.7"], hidden=HIDDEN, width=4, seed=0)


def test_pseudo_advantages_have_mean_zero_in_each_group_and_variance_one():
    torch.manual_seed(3)
    group = torch.tensor([7, 3, 3, 7, 3, 5, 7, 3])
    draws = torch.stack([pseudo_advantages(group) for _ in range(20_000)])
    for number in (7, 3):
        assert draws[:, group == number].mean(1).abs().max() < 1e-6
    assert (draws[:, group == 5] == 0).all()
    several = draws[:, group != 5]
    assert (several.var(0) - 1).abs().max() < 0.05 and several.mean(0).abs().max() < 0.04
