"""Laws of an adapter's state: all of it, to the bit, and another adapter's is refused untouched."""

import pytest
import torch

from forklora.state import adapter_tensors, put_adapter_tensors
from tiny_policy import FORMS, adapted, llama, logits, random_bases, shake


def made(kind, *, seed=0, **options):
    return adapted(kind, bases=random_bases(llama(), seed=seed), **options)[0]


@pytest.mark.parametrize(("kind", "trained"), FORMS)
def test_what_is_read_goes_back_to_the_bit_frozen_bases_included(kind, trained):
    model, other = (made(kind, seed=seed, train_basis=trained) for seed in (0, 1))
    shake(model)
    assert not torch.equal(logits(other), logits(model))
    put_adapter_tensors(other, adapter_tensors(model))
    assert torch.equal(logits(other), logits(model))
    assert {n for n, p in other.named_parameters() if p.requires_grad} == {
        n for n, p in model.named_parameters() if p.requires_grad
    }


def test_what_is_read_is_a_copy():
    model = made("span")
    tensors = adapter_tensors(model)
    next(iter(tensors.values())).add_(1.0)
    assert not all(torch.equal(t, tensors[n]) for n, t in adapter_tensors(model).items())


def test_another_adapter_is_refused_and_nothing_changes():
    model, before = made("block"), adapter_tensors(made("block"))
    for wrong in (adapter_tensors(made("span")), {n: t[:1] for n, t in before.items()}, {}):
        with pytest.raises(ValueError, match="adapter is another one"):
            put_adapter_tensors(model, wrong)
    assert all(torch.equal(t, before[n]) for n, t in adapter_tensors(model).items())


def test_a_model_without_an_adapter_has_no_state():
    assert adapter_tensors(made("span").unload()) == {}
