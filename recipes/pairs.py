"""Reads weights before and after side by side, one at a time: two checkpoints, or a base with a PEFT adapter.

Decisions: a weight is read anew whenever it is asked for, so that not even two copies of a large one are held; what
stands on one side alone is named, not guessed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from forklora.recipes.refusal import Refusal
from forklora.recipes.shelf import Shelf, checkpoint_folder
from torch import Tensor

_WIDE = 2**26  # numbers of a weight up to which its change is taken in float64


@dataclass(frozen=True, eq=False)
class Pair:
    """One weight before and after.

    Attributes:
        name: of the weight.
        old, new: where it is read.
    """

    name: str
    old: Mapping[str, Tensor]
    new: Mapping[str, Tensor]

    def before(self) -> Tensor:
        """The weight as it is stored."""
        return self._read(self.old)

    def after(self) -> Tensor:
        """The weight as it is stored, or as an adapter makes it."""
        return self._read(self.new)

    def delta(self) -> Tensor:
        """After less before, in float64; in float32 where the weight is large and was stored in less."""
        after = self.after()
        small = after.numel() <= _WIDE or torch.float64 in (after.dtype, self.old[self.name].dtype)
        wide = after.to(torch.float64 if small else torch.float32)
        return wide - self.before()

    def _read(self, shelf: Mapping[str, Tensor]) -> Tensor:
        found = shelf[self.name]
        if not found.isfinite().all():
            raise Refusal(f"{self.name} holds NaN or infinity: there is nothing to measure in a model that diverged")
        return found


class WeightPairs:
    """Every weight that stands in both models, one after the other.

    Attributes:
        names: of the weights that are compared; of an adapter, only those that it changes.
        only_base, only_tuned: names that stand on one side alone. An adapter has no weights that it leaves alone.

    Raises:
        Refusal: models that cannot be read or do not belong together.
    """

    def __init__(self, base: str, tuned: str) -> None:
        self._before = Shelf(base)
        folder = checkpoint_folder(tuned)
        self.only_base: list[str] = []
        self.only_tuned: list[str] = []
        if (folder / "adapter_config.json").exists():
            from forklora.recipes.merging import MergedWeights

            after: Mapping[str, Tensor] = MergedWeights(self._before, folder)
        else:
            after = Shelf(tuned)
            self.only_base = sorted(set(self._before) - set(after))
            self.only_tuned = sorted(set(after) - set(self._before))
            self._refuse_other_models(after)
        self._after = after
        self.names = [name for name in self._before if name in after and self._before.floats(name)]

    def _refuse_other_models(self, after: Shelf) -> None:
        both = [name for name in self._before if name in after]
        if not both:
            raise Refusal(
                f"{self._before.source} and {after.source} have no weight of the same name "
                f"({next(iter(self._before), 'none')}, {next(iter(after), 'none')}): they are other architectures"
            )
        for name in both:
            shapes = self._before.shape(name), after.shape(name)
            if shapes[0] != shapes[1]:
                raise Refusal(f"{name} is {shapes[0]} before and {shapes[1]} after: they are models of other sizes")

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Pair]:
        return (Pair(name, self._before, self._after) for name in self.names)
