"""Optimizers whose every step has a stated size: a length of the weights, or a change of the policy.

Decisions: a change of the policy is measured before the step, on rollouts at hand, with the weights moved for a moment
and put back to the bit; the gradients are scaled, and plain SGD takes the step. So it works in every ZeRO stage.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from forklora.trainers.engine import fix_length, full_gradient, length_factors, put_gradient
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from forklora.collective import summed
from forklora.gathering import whole
from forklora.optim import StepLengthSGD, fitting_length

Scaled = Sequence[tuple[nn.Parameter, float]]
FIRST_LOOK = 0.05  # length of the first look; later steps start from the last look of the step before
_CLEAR = 0.2  # change of the policy that stands out from the rounding of bfloat16


def _length_optimizer(parameters: Scaled, *, length: float, evenly: bool) -> StepLengthSGD:
    """``StepLengthSGD`` over parameters with their LoRA scalings."""
    groups: dict[float, list[Tensor]] = {}
    for parameter, scale in parameters:
        groups.setdefault(scale, []).append(parameter)
    grouped = [{"params": params, "scaling": scale} for scale, params in groups.items()]
    return StepLengthSGD(grouped, lr=length, evenly=evenly)


def stated_steps(trainer: Any, trained: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:  # noqa: ANN401
    """Plain SGD over a ForkGRPOTrainer's parameters whose steps have the size that its settings state."""
    args, scalings = trainer.args, _scalings(trainer.model)
    parameters = [(parameter, scalings.get(name, 1.0)) for name, parameter in trained]
    length, kl, evenly = args.step_length, args.step_kl, args.step_evenly
    if kl is None and not trainer.is_deepspeed_enabled:
        return _length_optimizer(parameters, length=length, evenly=evenly)
    sgd = torch.optim.SGD([parameter for parameter, _ in parameters], lr=kl if length is None else length)
    change = partial(fix_length, parameters, evenly=evenly)
    if kl is not None:
        change = PolicyStep(parameters, optimizer=sgd, kl=kl, length=length, evenly=evenly, policy=trainer)
    if trainer.is_deepspeed_enabled:
        # ZeRO cuts matrices to pieces: sizes are fixed on whole gradients, before its optimizer steps
        trainer.before_step = change
    else:
        sgd.register_step_pre_hook(lambda *_: change())
    return sgd


class Measured(Protocol):
    """A policy that can be asked what a change of its weights does to it.

    Attributes:
        looked: length at which the step before was looked at last.
    """

    looked: float

    def drawn_hidden(self) -> Tensor:
        """Hidden states at this rank's drawn tokens under the weights as they are, ``[m, d]``."""
        ...

    def apart(self, before: Tensor, after: Tensor) -> Tensor:
        """KL(before | after) at each of these positions, ``[m]``."""
        ...

    def metric(self, name: str, value: float) -> None:
        """Takes what is to be logged."""


class PolicyStep:
    """Called before plain SGD steps: scales the gradients so that the step moves the policy as far as stated.

    The change by a step is ``sqrt(2 KL(old | new))``, with the divergence per token averaged over drawn positions of
    this step's rollouts. To second order it is the root mean square change of a drawn token's log-probability, and in
    proportion to the length of the step. The direction is that of ``StepLengthSGD``; only its length is found, and a
    change below 0.2 in proportion to the length that makes 0.2: what is smaller drowns in the rounding of bfloat16.
    A schedule's share of the optimizer's first rate lowers the change, and the length, by the same share.

    Args:
        parameters: trained parameters with their scaling, the same on every rank.
        optimizer: plain SGD, with its first rate.
        kl: divergence, nats per token.
        length: no step is longer than this, in the weights; None sets no such limit.
        evenly: every matrix gets the same share of the length.
        policy: is asked.
    """

    def __init__(
        self,
        parameters: Scaled,
        *,
        optimizer: torch.optim.SGD,
        kl: float,
        length: float | None,
        evenly: bool,
        policy: Measured,
    ) -> None:
        self.parameters, self.optimizer, self.evenly, self.policy = parameters, optimizer, evenly, policy
        self.change, self.longest = math.sqrt(2 * kl), math.inf if length is None else length
        self.first = optimizer.param_groups[0]["lr"]

    @torch.no_grad()
    def __call__(self) -> None:
        """Every rank has to call this.

        Raises:
            FloatingPointError: a gradient is not finite; on every rank alike, and no step was taken.
        """
        factors = length_factors(self.parameters, evenly=self.evenly)
        rate = self.optimizer.param_groups[0]["lr"]
        full = [full_gradient(parameter) for parameter, _ in self.parameters]
        gradients = [g if g is None else g * factor for g, factor in zip(full, factors, strict=True)]
        if rate <= 0 or not any(g is not None and bool(g.any()) for g in gradients):
            return
        share = rate / self.first
        length = self._length(gradients, wanted=self.change * share, longest=self.longest * share)
        self.policy.metric("step/length", length)
        for (parameter, _), gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None:
                put_gradient(parameter, gradient * (length / rate))

    def _length(self, gradients: list[Tensor | None], *, wanted: float, longest: float) -> float:
        """Length of a step along these gradients that changes the policy as wanted; the longest if it does not."""
        before = self.policy.drawn_hidden()

        def change(length: float) -> float:
            with self._moved(gradients, length):
                divergence = _mean(self.policy.apart(before, self.policy.drawn_hidden()))
            return math.sqrt(2 * max(divergence, 0.0)) if math.isfinite(divergence) else math.inf

        if math.isfinite(longest) and change(longest) <= wanted:
            return longest
        clear = max(wanted, _CLEAR)
        self.policy.looked = fitting_length(change, wanted=clear, start=self.policy.looked)
        return min(self.policy.looked * wanted / clear, longest)

    @contextlib.contextmanager
    def _moved(self, gradients: list[Tensor | None], length: float) -> Iterator[None]:
        """Within the block every parameter stands where a step of this length would take it."""
        parameters = [parameter for parameter, _ in self.parameters]
        with whole(*parameters, write=True):
            kept = [parameter.detach().clone() for parameter in parameters]
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    parameter.sub_((gradient.view_as(parameter) * length).to(parameter))
        try:
            yield
        finally:
            with whole(*parameters, write=True):
                for parameter, old in zip(parameters, kept, strict=True):
                    parameter.copy_(old)


def _mean(values: Tensor) -> float:
    """Over the values of all ranks."""
    return summed(float(values.double().sum())) / max(summed(values.numel()), 1)


def _scalings(model: nn.Module) -> dict[str, float]:
    """LoRA scaling ``s`` of each adapter parameter by its name."""
    lora = [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]
    slots = (
        (f"{layer}.{slot}", getattr(module, slot), module) for layer, module in lora for slot in ("lora_A", "lora_B")
    )
    return {
        f"{name}.{adapter}.{parameter}": module.scaling[adapter]
        for name, inner, module in slots
        for adapter in inner
        for parameter, _ in inner[adapter].named_parameters()
    }
