"""A product of a basis and a core states itself, and reads itself, as one plain weight."""

import pytest
import torch
from torch import nn

from forklora.spanned import SpannedLinear, factor
from tiny_policy import orthonormal


def spanned(*, trained=False, size=12, width=4, rank=2):
    core = torch.randn(width, rank, generator=torch.Generator().manual_seed(3))
    return SpannedLinear(orthonormal(size, width), core, train_basis=trained)


def test_it_is_the_linear_map_it_states():
    layer, x = spanned(), torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer(x), x @ (layer.basis @ layer.core).T)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight))


@pytest.mark.parametrize("trained", [False, True])
def test_its_state_is_one_plain_weight(trained):
    state = spanned(trained=trained).state_dict()
    assert list(state) == ["weight"]
    plain = nn.Linear(2, 12, bias=False)
    plain.load_state_dict(state)
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(plain(x), spanned()(x))


@pytest.mark.parametrize("trained", [False, True])
def test_what_is_trained_is_the_core_and_the_basis_only_on_request(trained):
    layer = spanned(trained=trained)
    assert {name for name, _ in layer.named_parameters()} == ({"core", "basis"} if trained else {"core"})
    layer(torch.ones(1, 2)).sum().backward()
    assert layer.core.grad.abs().sum() > 0
    assert (layer.basis.grad is not None) == trained


@pytest.mark.parametrize("trained", [False, True])
def test_the_weight_comes_back_from_its_own_state(trained):
    saved, other = spanned(trained=trained), spanned(trained=trained)
    with torch.no_grad():
        other.core.zero_()
    other.load_state_dict(saved.state_dict())
    torch.testing.assert_close(other.weight, saved.weight)
    # in a basis that is kept the split is unique
    assert trained or torch.allclose(other.core, saved.core, atol=1e-6)


@pytest.mark.parametrize("trained", [False, True])
def test_what_torch_saves_comes_back_bit_for_bit_and_the_plain_product_alone_nearly(trained, tmp_path):
    saved, other, third = (spanned(trained=trained) for _ in range(3))
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    torch.save(saved.state_dict(), tmp_path / "state")
    other.load_state_dict(torch.load(tmp_path / "state"))
    third.load_state_dict({"weight": saved.weight.detach().clone()})
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), other.parameters(), strict=True))
    torch.testing.assert_close(third.weight, saved.weight)
    assert not torch.equal(third.core, saved.core)


def test_factors_that_do_not_make_the_weight_are_not_believed():
    saved, other = spanned(), spanned()
    state = saved.state_dict()
    with torch.no_grad():
        state["weight"].mul_(2)
    other.load_state_dict(state)
    torch.testing.assert_close(other.weight, 2 * saved.weight)


@pytest.mark.parametrize("trained", [False, True])
def test_parameters_under_their_own_names_are_read_too(trained):
    saved, other = spanned(trained=trained), spanned(trained=trained)
    with torch.no_grad():
        saved.core.add_(1)
    other.load_state_dict(dict(saved.named_parameters()))
    assert torch.equal(other.core, saved.core) and torch.equal(other.basis, saved.basis)


def test_a_weight_outside_the_span_is_refused_and_changes_nothing():
    layer, before = spanned(), spanned().state_dict()
    outside = before["weight"] + 0.1 * orthonormal(12, 6, seed=9)[:, 4:]
    with pytest.raises(RuntimeError, match="outside the span of this layer's basis"):
        layer.load_state_dict({"weight": outside})
    torch.testing.assert_close(layer.weight, before["weight"], rtol=0, atol=0)


def test_a_trained_basis_takes_up_a_weight_outside_its_start():
    layer, weight = spanned(trained=True), torch.randn(12, 2, generator=torch.Generator().manual_seed(8))
    layer.load_state_dict({"weight": weight})
    torch.testing.assert_close(layer.weight, weight)


@pytest.mark.parametrize(
    "state, words", [({}, "Missing key"), ({"weight": torch.zeros(12, 3)}, r"\(12, 3\), expected \(12, 2\)")]
)
def test_a_missing_or_ill_sized_weight_is_named(state, words):
    with pytest.raises(RuntimeError, match=words):
        spanned().load_state_dict(state)


@pytest.mark.parametrize("trained", [False, True])
def test_a_zero_weight_is_read(trained):
    layer = spanned(trained=trained)
    layer.load_state_dict({"weight": torch.zeros(12, 2)})
    assert layer.weight.abs().max() == 0
    assert torch.isfinite(layer.basis).all()


def test_a_product_that_is_not_finite_is_refused():
    with pytest.raises(RuntimeError):
        spanned().load_state_dict({"weight": torch.full((12, 2), torch.nan)})


def test_the_factors_solve_least_squares():
    basis, weight = orthonormal(12, 4), torch.randn(12, 2, generator=torch.Generator().manual_seed(8))
    core, kept = factor(weight, basis, free=False)
    torch.testing.assert_close(
        core, basis.double().T @ weight.double(), rtol=1e-5, atol=1e-5
    )  # orthonormal columns: the projection
    assert torch.equal(kept, basis.double())
    core, moved = factor(weight, basis, free=True)
    torch.testing.assert_close(moved @ core, weight.double())
    # the smallest change of U: it acts on the rows of C only
    assert torch.linalg.matrix_rank(moved - basis.double()) <= 2
