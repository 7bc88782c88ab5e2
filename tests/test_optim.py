"""Laws of the optimizers: a step has the stated length, a projected step is the dense step projected."""

import math

import pytest
import torch
from torch import nn

from forklora.optim import ProjectedSGD, StepLengthSGD, fitting_length
from tiny import close

OUT, IN, RANK = 7, 5, 3


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def orthonormal(rows, columns, seed=0):
    return torch.linalg.qr(random(rows, columns, seed=seed)).Q


def run(scaling, *, gain=1.0, steps=4, lr=0.1, optimizer=StepLengthSGD, dtype=torch.float32):
    """Two adapters ``s U A`` on a smooth loss of both weights: the dense updates after each step."""
    bases = [orthonormal(OUT, RANK, seed=i) for i in range(2)]
    factors = [nn.Parameter(torch.zeros(RANK, IN, dtype=dtype)) for _ in bases]
    targets = [random(OUT, IN, seed=7 + i) for i in range(2)]
    opt = optimizer([{"params": [a], "scaling": s} for a, s in zip(factors, scaling, strict=True)], lr=lr)
    path = []
    for _ in range(steps):
        weights = [s * u @ a.float() for s, u, a in zip(scaling, bases, factors, strict=True)]
        opt.zero_grad()
        loss = gain * sum((1 + (w - t).square()).log().sum() for w, t in zip(weights, targets, strict=True))
        loss.backward()
        opt.step()
        path.append(torch.stack([s * u @ a.detach().float() for s, u, a in zip(scaling, bases, factors, strict=True)]))
    return torch.stack(path)


@pytest.mark.parametrize("scaling", [(1.0, 1.0), (8.0, 8.0), (0.25, 4.0)])
def test_every_step_moves_the_weights_by_the_stated_length(scaling):
    path = run(scaling)
    steps = torch.diff(path, dim=0, prepend=torch.zeros_like(path[:1]))
    close(steps.flatten(1).norm(dim=1), torch.full((4,), 0.1))


@pytest.mark.parametrize("gain", [1e-30, 1e-12, 1.0, 1e12, 1e25])
@pytest.mark.parametrize("scaling", [(1.0, 1.0), (32.0, 32.0), (0.1, 3.0)])
def test_neither_scaling_nor_the_loss_s_size_changes_the_path(scaling, gain):
    close(run(scaling, gain=gain), run((1.0, 1.0)), 1e-4)


def test_the_step_goes_down_the_projected_gradient():
    """One step is ``-lr * P G / |P G|`` with ``G`` the gradient by the dense weight."""
    u, g = orthonormal(OUT, RANK), random(OUT, IN, seed=3)
    factor = nn.Parameter(torch.zeros(RANK, IN))
    factor.grad = 2.0 * u.T @ g
    StepLengthSGD([{"params": [factor], "scaling": 2.0}], lr=0.3).step()
    inside = u @ u.T @ g
    close(2.0 * u @ factor.detach(), -0.3 * inside / inside.norm())


def parameters(*gradients):
    found = [nn.Parameter(random(3, 2, seed=i)) for i, _ in enumerate(gradients)]
    for p, gradient in zip(found, gradients, strict=True):
        p.grad = gradient
    return found, [p.detach().clone() for p in found]


@pytest.mark.parametrize("gradients", [(torch.zeros(3, 2), torch.zeros(3, 2)), (None, None), (torch.zeros(3, 2), None)])
def test_without_a_gradient_everything_stays(gradients):
    found, before = parameters(*gradients)
    StepLengthSGD(found, lr=0.1).step()
    assert all(torch.equal(p, b) for p, b in zip(found, before, strict=True))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_gradient_that_is_no_number_is_told_and_nothing_moves(bad):
    found, before = parameters(torch.ones(3, 2), torch.tensor([[1.0, 2.0], [bad, 1.0], [0.0, 0.0]]))
    with pytest.raises(FloatingPointError, match="the step was not taken"):
        StepLengthSGD(found, lr=0.1).step()
    assert all(torch.equal(p, b) for p, b in zip(found, before, strict=True))


def test_the_global_norm_runs_over_all_groups_and_skips_what_has_no_gradient():
    found, before = parameters(torch.full((3, 2), 3.0), None, torch.full((3, 2), 4.0))
    StepLengthSGD([{"params": found[:2]}, {"params": found[2:]}], lr=1.0).step()
    moves = [p.detach() - b for p, b in zip(found, before, strict=True)]
    close(moves[0], torch.full((3, 2), -3 / 5 / 6**0.5))
    close(moves[2], torch.full((3, 2), -4 / 5 / 6**0.5))
    assert (moves[1] == 0).all()


def test_bfloat16_factors_move_by_about_the_length():
    path = run((1.0, 1.0), dtype=torch.bfloat16, steps=1)
    close(path[0].norm(), torch.tensor(0.1), 2e-2)


@pytest.mark.parametrize("lr", [-0.1, float("nan")])
def test_a_negative_length_is_refused(lr):
    with pytest.raises(ValueError, match="cannot be negative"):
        StepLengthSGD([nn.Parameter(torch.zeros(2))], lr=lr)
    with pytest.raises(ValueError, match="cannot be negative"):
        ProjectedSGD([(nn.Parameter(torch.zeros(4, 2)), torch.eye(4)[:, :1])], lr=lr)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_projected_step_is_the_dense_step_on_projected_gradients(momentum):
    """Two weights, five steps: torch's own SGD that is given ``U U^T G`` walks the same path, momentum and all."""
    bases = [orthonormal(OUT, RANK, seed=i) for i in range(2)]
    ours = [nn.Parameter(random(OUT, IN, seed=4 + i)) for i in range(2)]
    dense = [nn.Parameter(w.detach().clone()) for w in ours]
    start = [w.detach().clone() for w in ours]
    mine = ProjectedSGD(zip(ours, bases, strict=True), lr=0.05, momentum=momentum)
    theirs = torch.optim.SGD(dense, lr=0.05, momentum=momentum)
    for step in range(5):
        for i, (w, d, u) in enumerate(zip(ours, dense, bases, strict=True)):
            w.grad = torch.cos(w.detach() + step + i)
            d.grad = u @ (u.T @ torch.cos(d.detach() + step + i))
        mine.step()
        theirs.step()
    for w, d, u, s in zip(ours, dense, bases, start, strict=True):
        close(w.detach(), d.detach())
        moved = w.detach() - s
        assert (moved - u @ (u.T @ moved)).abs().max() < 1e-6 < 1e-2 < moved.abs().max()
    kept = [state["momentum"].shape for state in mine.state.values()]
    assert kept == ([(RANK, IN)] * 2 if momentum else [])


def test_a_weight_without_gradient_stays_where_it_is():
    weight = nn.Parameter(random(OUT, IN))
    before = weight.detach().clone()
    ProjectedSGD([(weight, orthonormal(OUT, RANK))], lr=0.1, momentum=0.5).step()
    assert torch.equal(weight, before)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_resumed_run_is_the_uninterrupted_one(momentum):
    paths = []
    for stops in (False, True):
        weight = nn.Parameter(random(OUT, IN))
        opt = ProjectedSGD([(weight, orthonormal(OUT, RANK))], lr=0.1, momentum=momentum)
        for step in range(4):
            if stops and step == 2:
                saved, opt = opt.state_dict(), ProjectedSGD([(weight, orthonormal(OUT, RANK))], lr=0.1, momentum=0.0)
                opt.load_state_dict(saved)
            weight.grad = torch.cos(weight.detach() + step)
            opt.step()
        paths.append(weight.detach())
    assert torch.equal(*paths)


@pytest.mark.parametrize("optimizer", ["length", "projected"])
def test_a_closure_is_run_with_gradients_and_its_loss_handed_back(optimizer):
    weight = nn.Parameter(random(OUT, IN))
    pairs = {"length": lambda: StepLengthSGD([weight], lr=0.1)}
    opt = pairs.get(optimizer, lambda: ProjectedSGD([(weight, orthonormal(OUT, RANK))], lr=0.1))()

    def closure():
        loss = weight.square().sum()
        weight.grad = None
        loss.backward()
        return loss

    first, second = opt.step(closure), opt.step(closure)
    assert second < first


@pytest.mark.parametrize("weight", [torch.zeros(OUT * IN), torch.zeros(OUT), torch.zeros(0), torch.zeros(OUT + 1, IN)])
def test_a_partitioned_weight_is_refused(weight):
    with pytest.raises(ValueError, match="project_gradients"):
        ProjectedSGD([(nn.Parameter(weight), orthonormal(OUT, RANK))], lr=0.1)


@pytest.mark.parametrize("momentum", [-0.1, 1.0])
def test_a_momentum_that_grows_is_refused(momentum):
    with pytest.raises(ValueError, match="must lie in"):
        ProjectedSGD([(nn.Parameter(torch.zeros(4, 2)), torch.eye(4)[:, :1])], lr=0.1, momentum=momentum)


@pytest.mark.parametrize("scaling", [0.5, 1.0, 3.0])
def test_evenly_every_matrix_with_a_gradient_moves_by_the_same_length(scaling):
    """``|dW| = s |d theta| = lr / sqrt(n)`` for each of the n, whatever their gradients' sizes; together ``lr``."""
    sizes = [1e-3, 1.0, 50.0, 0.0]
    found = [nn.Parameter(torch.zeros(3, 4)) for _ in sizes]
    for parameter, size in zip(found, sizes, strict=True):
        parameter.grad = size * torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    StepLengthSGD([{"params": found, "scaling": scaling}], lr=0.3, evenly=True).step()
    lengths = [scaling * float(p.detach().norm()) for p in found]
    assert lengths == pytest.approx([0.3 / 3**0.5] * 3 + [0.0], rel=1e-5)
    direction = -found[1].grad / found[1].grad.norm()
    assert torch.allclose(found[1].detach() / found[1].detach().norm(), direction, atol=1e-6)


@pytest.mark.parametrize(("slope", "start"), [(1.0, 1.0), (300.0, 0.05), (1e-5, 0.05)])
def test_a_proportional_change_is_met_exactly_from_any_start(slope, start):
    length = fitting_length(lambda c: slope * c, wanted=0.2, start=start)
    assert slope * length == pytest.approx(0.2, rel=1e-9)


@pytest.mark.parametrize("change", [lambda c: c + 3 * c**2, lambda c: c / (1 + c), lambda c: c**1.5])
def test_a_curved_change_is_met_within_a_fifth(change):
    assert change(fitting_length(change, wanted=0.5, start=0.01)) == pytest.approx(0.5, rel=0.2)


def test_lengths_that_break_the_policy_or_do_nothing_are_left_behind():
    seen = []

    def change(length):
        seen.append(length)
        return math.nan if length > 1 else 0.0 if length < 1e-3 else 5 * length

    assert 5 * fitting_length(change, wanted=0.2, start=40.0) == pytest.approx(0.2)
    assert 5 * fitting_length(change, wanted=0.2, start=1e-6) == pytest.approx(0.2)
    assert len(seen) <= 8


def test_where_nothing_fits_the_closest_look_is_taken():
    assert fitting_length(lambda c: 0.7 if c > 0.1 else 0.1, wanted=0.25, start=1.0) < 1.0
    assert math.isfinite(fitting_length(lambda c: math.nan, wanted=0.2, start=1.0))
