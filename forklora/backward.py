"""Runs one backward pass on pseudo-advantages over a trace and sums what each layer saw.

Decisions: no reward is used; parameters ask for no gradient, so the pass costs activations only; each layer's ``x``
and ``g`` go into its sketches inside the backward hook and are let go at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from forklora.forward import Calls, completion_hidden
from forklora.sketch import Sketch
from forklora.trace import Trace
from forklora.unembed import evaluation_mode, hidden_only, output_head, unwrap

# Positions of a row that are joined exactly: beyond that the Gram matrices would outgrow the activations.
_BLOCK = 256
# How architectures name the linear layers that add to the residual stream.
_WRITERS = ("o_proj", "down_proj", "c_proj", "out_proj", "fc2", "dense", "dense_4h_to_h", "wo", "w2")


def linear_layers(model: nn.Module) -> list[str]:
    """Names of all linear layers (``Linear`` and its quantized relatives, GPT-2's ``Conv1D``) except the head.

    A layer that carries an adapter has its name in the bare model, and the adapter's own layers do not count.
    """
    base, head = unwrap(model), output_head(model)
    return [
        name.removesuffix(".base_layer")
        for name, module in base.named_modules()
        if module is not head
        and ".lora_" not in name
        and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
    ]


def residual_writers(model: nn.Module, width: int) -> list[str]:
    """Names of the linear layers that write into a residual stream of ``width`` numbers, told by name and size."""
    modules = dict(unwrap(model).named_modules())
    return [
        name
        for name in linear_layers(model)
        if name.rpartition(".")[2] in _WRITERS and layer_shape(modules[name])[0] == width
    ]


def layer_shape(module: Any) -> tuple[int, int]:  # noqa: ANN401 - a linear layer of any library
    """``(d_out, d_in)`` of a linear layer, also quantized, partitioned, or transposed as GPT-2's ``Conv1D`` is."""
    if hasattr(module, "out_features"):
        return int(module.out_features), int(module.in_features)
    d_in, d_out = getattr(module.weight, "ds_shape", module.weight.shape)
    return int(d_out), int(d_in)


class LayerSums:
    """Additive statistics of target layers over any number of traces.

    With ``G_i = sum_t g_t x_t^T`` the weight gradient that row ``i`` of a forward call sends to a layer (``x`` the
    layer's input, ``g`` the gradient at its output), per layer ``S = sum_i G_i G_i^T`` (output side) and ``H = sum_i
    G_i^T G_i`` (input side), and once ``C = sum delta delta^T``. Under pseudo-advantages these are the second moments
    of the policy gradient itself, so their leading directions hold the largest expected share of it. A prompt that
    several rows share is run once and is a row of its own, with the sum of the rows' ``g``. Rows are cut into blocks
    of positions.

    Args:
        model: the model, for the shapes of its layers.
        layers: names of the target layers.
        hidden: size of a hidden state.
        width: columns of each sketch.
        seed: of all sketches.
    """

    def __init__(self, model: nn.Module, layers: Sequence[str], *, hidden: int, width: int, seed: int) -> None:
        modules = dict(unwrap(model).named_modules())
        if unknown := [n for n in layers if n not in modules]:
            raise ValueError(f"the model has no layers named {', '.join(unknown[:3])}.")
        self.modules = {n: modules[n] for n in layers}
        self.sides: dict[str, tuple[Sketch, Sketch]] = {}
        for name, module in self.modules.items():
            d_out, d_in = layer_shape(module)
            self.sides[name] = (
                Sketch(d_out, width=min(width, d_out), seed=seed),
                Sketch(d_in, width=min(width, d_in), seed=seed),
            )
        self.signal = Sketch(hidden, width=min(256, hidden), seed=seed)

    def add(self, model: nn.Module, trace: Trace, *, advantages: Float[Tensor, " n"]) -> None:
        """Run the centered loss ``sum A <delta, h>`` backward over the trace and add what each layer saw."""
        delta, mask = signal_of(trace), trace.completion_mask
        self.signal.add(delta[mask])
        with listening(self.modules, self._add):
            backward(model, trace, advantages=advantages)

    def _add(self, name: str, x: Tensor, g: Tensor) -> None:
        output, input_ = self.sides[name]
        for start in range(0, x.shape[1], _BLOCK):
            xs, gs = (t[:, start : start + _BLOCK].float() for t in (x, g))
            output.add_rows(gs, xs @ xs.mT)
            input_.add_rows(xs, gs @ gs.mT)

    def all_reduce(self) -> None:
        """Add up the sums of all ranks, so that every rank reads the same bases; nothing to do on one."""
        self.signal.all_reduce()
        for sides in self.sides.values():
            for side in sides:
                side.all_reduce()


@contextlib.contextmanager
def listening(modules: Mapping[str, nn.Module], receive: Callable[[str, Tensor, Tensor], None]) -> Iterator[None]:
    """Within the block every backward pass hands over, per layer: name, input ``x`` and output gradient ``g``."""

    def listen(name: str) -> Callable[..., None]:
        def forward(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            x = args[0].detach()
            if output.requires_grad:
                output.register_hook(lambda g: receive(name, _rows(x), _rows(g.detach())))

        return forward

    handles = [module.register_forward_hook(listen(name)) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _rows(values: Tensor) -> Tensor:
    """``[rows, positions, d]``; where a model has flattened its rows away, every position is a row of its own."""
    return values if values.ndim == 3 else values.flatten(0, -2)[:, None]


class WeightGradients:
    """Gradient ``G = sum g x^T`` of the centered loss at each layer, dense, over any number of traces.

    Args:
        model: the model.
        layers: names of the layers.
    """

    def __init__(self, model: nn.Module, layers: Sequence[str]) -> None:
        modules = dict(unwrap(model).named_modules())
        self.modules = {name: modules[name] for name in layers}
        self.sums: dict[str, Float[Tensor, "o i"]] = {}

    def add(self, model: nn.Module, trace: Trace, *, advantages: Float[Tensor, " n"]) -> None:
        """Run the loss backward over the trace and add what each layer's weight would have got."""
        with listening(self.modules, self._add):
            backward(model, trace, advantages=advantages)

    def _add(self, name: str, x: Tensor, g: Tensor) -> None:
        found = g.flatten(0, -2).float().T @ x.flatten(0, -2).float()
        self.sums[name] = self.sums[name] + found if name in self.sums else found


def signal_of(trace: Trace) -> Float[Tensor, "n t d"]:
    """The trace's backward signal, or an error that says how to record it."""
    if trace.delta is None:
        raise ValueError("the trace holds no backward signal delta: sample it with record=True.")
    return trace.delta


def backward(model: nn.Module, trace: Trace, *, advantages: Float[Tensor, " n"]) -> None:
    """Backward pass of ``sum_t A <delta_t, h_t>`` through all activations; no parameter gets a gradient."""
    device = next(unwrap(model).parameters()).device
    mask = trace.completion_mask.to(device)
    with frozen(model), torch.enable_grad():
        hidden = completion_hidden(
            model,
            trace.prompt_ids.to(device),
            prompt_mask=trace.prompt_mask.to(device),
            completion_ids=trace.completion_ids.to(device),
            completion_mask=mask,
        )
        weighed = (hidden.float() * signal_of(trace).to(device)).sum(-1) * advantages.to(device)[:, None]
        torch.where(mask, weighed, 0.0).sum().backward()


def residual_signal(model: nn.Module, trace: Trace) -> Float[Tensor, "n d"]:
    """The backward signal at the residual stream, past the final norm only: the identity path, one row per token.

    For ``h = gain * r / rms(r)`` it is ``(I - rhat rhat^T)(gain * delta) / rms(r)`` ("Low-rank in hidden space",
    section 4). It is taken by autograd through the norm module itself, so any norm is right.

    Raises:
        ValueError: the module before the head is not a norm of the residual stream.
    """
    calls: list[tuple[nn.Module, Tensor]] = []  # every norm the forward pass went through, with its input
    base = unwrap(model)
    norms = [m for m in base.modules() if "norm" in type(m).__name__.lower()]
    handles = [m.register_forward_hook(lambda m, args, _: calls.append((m, args[0]))) for m in norms]
    device = next(base.parameters()).device
    mask = trace.completion_mask.to(device)
    ids = torch.cat([trace.prompt_ids, trace.completion_ids], 1).to(device)
    whole_mask = torch.cat([trace.prompt_mask.to(device), mask], 1)
    try:
        with frozen(model), torch.no_grad():
            hidden = _plain_hidden(model, ids, whole_mask)
        fed = bool(calls) and calls[-1][1].shape == hidden.shape
    finally:
        for handle in handles:
            handle.remove()
    norm, stream = calls[-1] if fed else (nn.Identity(), hidden)
    with frozen(model), torch.no_grad():
        if not fed or not torch.equal(norm(stream), hidden):
            raise ValueError(f"the head of {type(base).__name__} is not fed by a norm of the residual stream.")
    start = trace.prompt_ids.shape[1] - 1
    at = stream[:, start:-1][mask].detach().requires_grad_(True)
    with frozen(model), torch.enable_grad():
        (found,) = torch.autograd.grad(norm(at), at, signal_of(trace).to(device)[mask].to(at.dtype))
    return found.float()


def _plain_hidden(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    with hidden_only(model) as caught:
        model(input_ids=ids, **Calls.of(model).arguments(mask, length=ids.shape[1], cache=None))
    return caught[0]


def pseudo_advantages(group: Tensor, draw: Float[Tensor, " n"] | None = None) -> Float[Tensor, " n"]:
    """Random signals with mean zero in each group, scaled so that each has variance one: ``[n]``.

    They are made from normal numbers: ``draw``, or such of torch's global generator.
    """
    draw = torch.randn(len(group)) if draw is None else draw
    _, index = torch.unique(group, return_inverse=True)
    count = torch.zeros(int(index.max()) + 1).index_add(0, index, torch.ones(len(group)))[index]
    mean = torch.zeros(int(index.max()) + 1).index_add(0, index, draw)[index] / count
    return (draw - mean) * (count / (count - 1).clamp_min(1)).sqrt()


@contextlib.contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Within the block gradients start at the input embeddings and reach no parameter; the model is in evaluation mode.

    Everything is put back afterwards, on errors too.
    """
    asked = [p for p in model.parameters() if p.requires_grad]
    source = unwrap(model).get_input_embeddings()
    handle = source.register_forward_hook(
        lambda _, __, out: out.requires_grad_(True) if torch.is_grad_enabled() else out
    )
    for p in asked:
        p.requires_grad_(False)
    try:
        with evaluation_mode(model):
            yield
    finally:
        handle.remove()
        for p in asked:
            p.requires_grad_(True)
