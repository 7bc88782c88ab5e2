"""The LoRA variant for PEFT: ``ForkLoraConfig`` and the four kinds.

Decisions: every kind lives in PEFT's own ``lora_A`` and ``lora_B`` slots, so PEFT's forward, merging, saving and
loading are used as they are; what is frozen is declared through PEFT's list of frozen weights, which PEFT applies again
after ``set_adapter``, ``load_adapter`` and the rest; a factor made of two (``U C`` or ``U Gamma``) is one small module
that states and reads itself as a plain ``weight``. So whatever saves the model writes an ordinary LoRA.

    span    W + s U A            U frozen, A = 0 trained
    core    W + s U C A          U frozen, C = first unit vectors and A = 0 trained
    inputs  W + s B Q^T          Q frozen, B = 0 trained
    block   W + s U Gamma Q^T    U and Q frozen, Gamma = 0 trained
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import Linear, LoraLayer, LoraVariant
from peft.tuners.tuners_utils import _get_in_out_features
from peft.utils.other import get_pattern_key
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from forklora.gathering import announce, kept_whole
from forklora.lowrank import add_low_rank
from forklora.packing import LinearMap
from forklora.spanned import PlainSlot, Recalled, SpannedLinear, leading, sides
from forklora.targets import HEADS, inner, refuse_head, refuse_idle_patterns, refuse_layer, target_layers

KINDS = ("span", "core", "inputs", "block")
# LoRA options whose meaning for a fixed basis is undefined: refused by name instead of half working.
_REFUSED = {
    "use_dora": False, "lora_bias": False, "use_bdlora": None, "arrow_config": None, "alora_invocation_tokens": None,
    "velora_config": None, "monteclora_config": None, "kasa_config": None, "target_parameters": None,
    "trainable_token_indices": None, "layer_replication": None, "megatron_config": None, "eva_config": None,
    "corda_config": None, "lora_ga_config": None, "use_qalora": False, "modules_to_save": None, "bias": "none",
}  # fmt: skip


@dataclass
class ForkLoraConfig(LoraConfig):
    """A ``LoraConfig`` whose factors start from, and mostly stay in, the bases of the model's forks.

    Use it wherever a ``LoraConfig`` goes. With ``bases`` it works with any trainer; without, ``ForkGRPOTrainer``
    collects them from its own first rollouts.

    Attributes:
        kind: ``span``, ``core``, ``inputs`` or ``block``; see the module's table.
        width: number ``k`` of output directions of ``core`` and ``block``; None takes ``r`` (block) or ``max(16, r)``
            (core).
        bases: mapping of layer name to its bases: a ``LayerBasis``, a pair ``(output [d_out, k], input [d_in, m])`` or,
            for the kinds that need only one side, a tensor. Kept out of saved files.
        train_basis: train the basis too; then it is only the starting point and nothing keeps the update in the span.

    ``r`` is the rank of the update (number of input directions for ``inputs`` and ``block``); ``lora_alpha`` defaults
    to ``r``, so the scaling is 1.
    """

    kind: str = field(default="span", metadata={"help": f"One of {', '.join(KINDS)}.", "is_lora_variant": True})
    r: int = field(default=1, metadata={"help": "Rank of the update."})
    lora_alpha: Any = field(default=None, metadata={"help": "Scaling is lora_alpha / r; None takes r."})
    target_modules: Any = field(default="all-linear", metadata={"help": "As in LoraConfig."})
    width: int | None = field(default=None, metadata={"help": "Output directions of core and block."})
    bases: Mapping[str, Any] | None = field(default=None, repr=False, metadata={"help": "Layer name to bases."})
    train_basis: bool = field(default=False, metadata={"help": "Train the basis too."})
    folds: int = field(default=0, init=False, repr=False, metadata={"help": "How often bases were renewed so far."})

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} is not one of {', '.join(KINDS)}.")
        if self.r < 1:
            raise ValueError(f"r={self.r} must be 1 or more.")
        self.lora_alpha = self.r if self.lora_alpha is None else self.lora_alpha
        super().__post_init__()
        if self.init_lora_weights is not True:
            raise ValueError(
                f"init_lora_weights={self.init_lora_weights!r}: the bases are the initialization; leave it True."
            )
        for name, neutral in _REFUSED.items():
            if getattr(self, name) not in (neutral, None, False):
                raise ValueError(f"{name}={getattr(self, name)!r} has no meaning for kind={self.kind!r}: leave it out.")
        if self.width is not None and self.kind in ("span", "inputs"):
            raise ValueError(f"width={self.width} belongs to core and block; kind={self.kind!r} has only r={self.r}.")
        if self.output_width < self.r and self.kind in ("core", "block"):
            raise ValueError(
                f"width={self.width} output directions cannot carry rank r={self.r}: width must be r or more."
            )
        if self.bases is not None:
            refuse_idle_patterns(self, self.bases)
        layers: dict[Any, Any] = {nn.Linear: ForkLinear, Conv1D: ForkLinear, nn.Module: refuse_layer}
        self._register_custom_module(layers)

    @property
    def output_width(self) -> int:
        """Output directions the kind needs by default: 0 for ``inputs``."""
        chosen = {"span": self.r, "inputs": 0, "block": self.width or self.r, "core": self.width or max(16, self.r)}
        return chosen[self.kind]

    @property
    def input_width(self) -> int:
        """Input directions the kind needs by default: 0 for ``span`` and ``core``."""
        return self.r if self.kind in ("inputs", "block") else 0

    def directions(self, layer: str) -> tuple[int, int]:
        """Output and input directions that the adapter of one layer starts from, by the layer's own rank."""
        ranks = self.rank_pattern or {}
        r = ranks.get(get_pattern_key(list(ranks), layer), self.r)
        output = {"span": r, "inputs": 0}.get(self.kind, max(self.output_width, r))
        return output, r if self.kind in ("inputs", "block") else 0

    def to_dict(self) -> dict[str, Any]:
        """What goes into ``adapter_config.json``: keys of ``LoraConfig`` only, so that stock PEFT loads it."""
        bases, self.bases = self.bases, None  # asdict would copy every tensor
        try:
            found = asdict(self)
        finally:
            self.bases = bases
        known = {f.name for f in fields(LoraConfig)} - {"runtime_config"}
        return {key: value for key, value in found.items() if key in known} | self._folded()

    def _folded(self) -> dict[str, Any]:
        """Ranks with all that is kept of earlier bases, and alphas that leave the scaling as it is."""
        times = self.folds + 1
        growth = times**0.5 if self.use_rslora and times > 1 else times
        ranks, alphas = self.rank_pattern or {}, self.alpha_pattern or {}
        return {
            "r": self.r * times,
            "lora_alpha": self.lora_alpha * growth,
            "rank_pattern": {name: r * times for name, r in ranks.items()},
            "alpha_pattern": {name: alpha * growth for name, alpha in alphas.items()},
        }


class ForkVariant(LoraVariant):
    """Fills PEFT's two slots for a kind; forward and merging are vanilla LoRA's."""

    @staticmethod
    def init(  # pyright: ignore[reportIncompatibleMethodOverride] - PEFT calls it with these
        module: Any,  # noqa: ANN401
        adapter_name: str,
        config: ForkLoraConfig,
        **kwargs: Any,
    ) -> None:
        """Called by PEFT at the end of ``update_layer``: put the layer's bases into ``lora_A`` and ``lora_B``."""
        layer = kwargs["target_name"]
        refuse_head(layer, layer.rpartition(".")[2] in HEADS)
        start = starts(module, config, layer=layer)
        for name in ("lora_A", "lora_B"):
            slots = getattr(module, name)
            made = slots[adapter_name].weight  # PEFT has cast it to the base's precision, and may cast it up again
            first = start.get(name, torch.zeros(made.shape, dtype=torch.float32)).to(made.device)
            slot: Any = PlainSlot(first, rank_side=0 if name == "lora_A" else 1)
            if name == "lora_B" and config.kind in ("core", "block"):
                shape = first.shape[1], module.r[adapter_name]
                slot = SpannedLinear(first, first_core(config.kind, shape).to(first), train_basis=config.train_basis)
            slots[adapter_name] = slot.narrowed(made.dtype)
        if not config.train_basis:
            frozen = tuple(n for n in start if isinstance(getattr(module, n)[adapter_name], PlainSlot))
            owned = {name: tuple(kept) for name, kept in module.frozen_peft_weight_names.items()}
            module.frozen_peft_weight_names = {**owned, adapter_name: frozen}

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **_: Any) -> Tensor:  # noqa: ANN401
        """``result + s B (A x)``."""
        slots = module.lora_A[active_adapter], module.lora_B[active_adapter]
        announce(module, *slots)
        a, b = (slot.stated() for slot in slots)
        x = module.lora_dropout[active_adapter](x)
        return add_low_rank(result, x, a=a, b=b, scaling=module.scaling[active_adapter])

    @staticmethod
    def merge_safe(module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:  # noqa: ANN401
        """The merged weight as a new tensor."""
        return orig_weight + _delta(module, active_adapter, orig_weight)

    @staticmethod
    def merge_unsafe(module: Any, active_adapter: str, orig_weight: Tensor) -> None:  # noqa: ANN401
        """Add the update to the weight in place."""
        orig_weight.data += _delta(module, active_adapter, orig_weight)

    @staticmethod
    def unmerge(module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:  # noqa: ANN401
        """Take the update out again."""
        return orig_weight - _delta(module, active_adapter, orig_weight)


class ForkLinear(Linear):
    """PEFT's LoRA layer for ``Linear`` and ``Conv1D`` that also knows the fork variant."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: LoraConfig, **kwargs: Any) -> None:  # noqa: ANN401
        transposed = isinstance(inner(base_layer), Conv1D)
        super().__init__(base_layer, adapter_name, config=config, is_target_conv_1d_layer=transposed, **kwargs)
        self.fan_in_fan_out = transposed

    def update_layer(self, *args: Any, config: LoraConfig, **kwargs: Any) -> None:
        """As PEFT's; the random start it draws for slots that the bases fill leaves no trace in the random states."""
        weight = self.get_base_layer().weight
        devices = [weight.device] if weight.is_cuda else []
        with kept_whole(), torch.random.fork_rng(devices, enabled=isinstance(config, ForkLoraConfig)):
            super().update_layer(*args, config=config, **kwargs)

    def _cast_input_dtype(self, x: Any, dtype: torch.dtype) -> Any:  # noqa: ANN401
        """Not for the fork variant, which reads its input as it is; PEFT would copy it to float32 at every layer."""
        ours = all(isinstance(self.lora_variant.get(name), ForkVariant) for name in self.active_adapters)
        return x if ours else super()._cast_input_dtype(x, dtype)

    def linear_map(self) -> LinearMap | None:
        """What this layer computes, where that is its frozen base and one fork adapter; None in any other state."""
        names: list[str] = list(self.active_adapters)
        base: Any = self.get_base_layer()
        if self.merged or type(base) is not nn.Linear:
            return None
        if self.disable_adapters or not any(name in self.lora_A for name in names):
            return LinearMap(base.weight, base.bias)
        dropped = self.training and any(isinstance(self.lora_dropout[n], nn.Dropout) for n in names)
        if dropped or len(names) != 1 or not isinstance(self.lora_variant.get(names[0]), ForkVariant):
            return None
        a: Any = self.lora_A[names[0]]
        b: Any = self.lora_B[names[0]]
        if not all(p.numel() for p in (base.weight, *a.parameters(), *b.parameters())):
            return None  # in pieces under ZeRO-3
        return LinearMap(base.weight, base.bias, a.stated(), b.stated() * self.scaling[names[0]])

    def get_delta_weight(self, adapter: str) -> Tensor:
        """As PEFT's, with what is kept of earlier bases."""
        delta = super().get_delta_weight(adapter)
        a, b = self.lora_A[adapter], self.lora_B[adapter]
        if not isinstance(a, Recalled) or not isinstance(b, Recalled) or a.kept is None or b.kept is None:
            return delta
        more = self.scaling[adapter] * (b.kept @ a.kept)
        return delta + (more.T if self.fan_in_fan_out else more).to(delta)

    def resolve_lora_variant(self, *, config: LoraConfig, **kwargs: Any) -> LoraVariant | None:
        """Ours for a fork adapter; a plain LoRA beside it gets PEFT's."""
        if isinstance(config, ForkLoraConfig):
            return ForkVariant()
        return super().resolve_lora_variant(config=config, **kwargs)


def add_fork_lora(
    model: nn.Module, config: ForkLoraConfig, bases: Mapping[str, Any] | None = None, *, adapter_name: str = "default"
) -> PeftModel:
    """Put a fork adapter on a model: a ``PeftModel`` that every trainer accepts.

    Args:
        model: a base model, or a ``PeftModel`` that gets one more adapter.
        config: kind, rank and targets; it is not changed.
        bases: layer name to bases (see ``ForkLoraConfig.bases``); None takes the config's own.
        adapter_name: PEFT's name of the adapter.

    Raises:
        ValueError: a target layer without a basis, or a basis with too few directions or wrong sizes.
    """
    chosen = replace(config, bases=config.bases if bases is None else bases)
    layers = dict(model.get_base_model().named_modules() if isinstance(model, PeftModel) else model.named_modules())
    for name in target_layers(model, chosen):  # before the first layer is changed
        if isinstance(layers[name], LoraLayer) and not isinstance(layers[name], ForkLinear):
            raise ValueError(f"{name} already has a plain LoRA layer: put the fork adapter on first, LoRA beside it.")
        d_in, d_out = _get_in_out_features(inner(layers[name]))
        sides(chosen.bases, kind=chosen.kind, layer=name, shape=(d_out or 0, d_in or 0))
    if isinstance(model, PeftModel):
        model.add_adapter(adapter_name, chosen)
        return model
    return get_peft_model(model, chosen, adapter_name=adapter_name)


def first_core(kind: str, shape: Sequence[int]) -> Tensor:
    """Trained numbers ``[k, r]`` between the bases before the first step: unit vectors for ``core``, zeros."""
    return torch.eye(*shape) if kind == "core" else torch.zeros(*shape)


def starts(module: Any, config: ForkLoraConfig, *, layer: str) -> dict[str, Tensor]:  # noqa: ANN401
    """What the bases put into PEFT's slots of one layer: ``U [d_out, k]`` for lora_B, ``Q^T [r, d_in]`` for lora_A.

    Raises:
        ValueError: the layer has no basis, or one that does not fit.
    """
    shape = (module.out_features, module.in_features)
    output, input_ = sides(config.bases, kind=config.kind, layer=layer, shape=shape)
    k, m = config.directions(layer)
    found = {}
    if m:
        found["lora_A"] = leading(input_, m, where=f"{layer}, input side").T.contiguous()
    if k:
        found["lora_B"] = leading(output, k, where=f"{layer}, output side")
    return found


def _delta(module: Any, adapter: str, weight: Tensor) -> Tensor:  # noqa: ANN401
    if not weight.dtype.is_floating_point or math.prod(weight.shape) != module.out_features * module.in_features:
        raise ValueError(
            f"cannot merge into a weight stored as {weight.dtype} {tuple(weight.shape)}: export the adapter instead "
            "(save_plain_lora), or load the base unquantized."
        )
    return module.get_delta_weight(adapter).to(weight.dtype)
