"""Laws of the low-rank term: the plain formula and its derivatives, in every precision of layer and factors."""

import pytest
import torch

from forklora.lowrank import add_low_rank
from tiny import close


def case(shape=(3, 4), *, rank=2, dtype=torch.float64, factors=torch.float64):
    generator = torch.Generator().manual_seed(0)
    result, x = (torch.randn(*shape, n, generator=generator).to(dtype) for n in (7, 5))
    a, b = (torch.randn(*n, generator=generator).to(factors) for n in ((rank, 5), (7, rank)))
    return [t.requires_grad_(True) for t in (result, x, a, b)]


@pytest.mark.parametrize("shape", [(3, 4), (2, 1), (6,), (2, 2, 3)])
@pytest.mark.parametrize("rank", [1, 3])
def test_value_and_every_derivative_are_those_of_the_formula(shape, rank):
    inputs = case(shape, rank=rank)
    assert torch.autograd.gradcheck(lambda r, x, a, b: add_low_rank(r, x, a=a, b=b, scaling=0.7), inputs)
    result, x, a, b = inputs
    close(add_low_rank(result, x, a=a, b=b, scaling=0.7), result + 0.7 * (x @ a.T) @ b.T, 1e-12)


def test_in_a_narrow_layer_the_factors_and_their_gradients_stay_wide():
    result, x, a, b = case((64,), dtype=torch.bfloat16, factors=torch.float32)
    found = add_low_rank(result, x, a=a, b=b, scaling=0.7)
    assert found.dtype == torch.bfloat16
    exact = result.double() + 0.7 * (x.double() @ a.double().T) @ b.double().T
    assert (found.double() - exact).abs().max() <= 2**-7 * exact.abs().max()
    grads = torch.autograd.grad(found.float().square().sum(), [result, x, a, b])
    assert [g.dtype for g in grads] == [torch.bfloat16] * 2 + [torch.float32] * 2
    wide = [t.detach().double().requires_grad_(True) for t in (result, x, a, b)]
    loss = (wide[0] + 0.7 * (wide[1] @ wide[2].T) @ wide[3].T).square().sum()
    for one, other in zip(grads, torch.autograd.grad(loss, wide), strict=True):
        assert (one.double() - other).norm() <= 0.02 * other.norm()


def test_a_frozen_factor_gets_no_gradient():
    result, x, a, b = case()
    found = add_low_rank(result, x.detach(), a=a, b=b.detach(), scaling=1.0)
    found.sum().backward()
    assert a.grad is not None and b.grad is None and x.grad is None


def test_under_autocast_the_precisions_are_the_same():
    inputs = case((4, 3), dtype=torch.bfloat16, factors=torch.float32)
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            value = add_low_rank(*inputs[:2], a=inputs[2], b=inputs[3], scaling=0.7)
        found.append([value, *torch.autograd.grad(value.float().sum(), inputs)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
