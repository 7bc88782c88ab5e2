"""Laws of whole gradients under DeepSpeed: in every stage, on two ranks, the steps are those of one process alone."""

from functools import partial

import pytest
import torch
from forklora.trainers.engine import before_step, fix_length, project_gradients
from forklora.trainers.stepping import PolicyStep
from torch import distributed, nn

from forklora.optim import ProjectedSGD, StepLengthSGD
from ranks import engine, together
from tiny import close

SIZES, STEPS, SCALINGS = (5, 7, 3), 3, (2.0, 0.5)


class Two(nn.Module):
    """Two matrices, the second of them behind the first, and a loss per row."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = zip(SIZES[1:], SIZES, strict=False)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(*s, generator=generator)) for s in shapes])

    def forward(self, x):
        for weight in self.weights:
            x = torch.tanh(x @ weight.T)
        return x.square().sum(-1).mean()


def data():
    return torch.randn(STEPS, 4, SIZES[0], generator=torch.Generator().manual_seed(1))


def bases():
    return [torch.linalg.qr(torch.randn(n, 2, generator=torch.Generator().manual_seed(n))).Q for n in SIZES[1:]]


def alone(optimizer_of):
    """Weights after the steps in one process, all rows together."""
    model = Two()
    optimizer = optimizer_of(list(model.weights))
    for rows in data():
        optimizer.zero_grad()
        model(rows).backward()
        optimizer.step()
    return [weight.detach() for weight in model.weights]


def under(stage, change, *, optimizer):
    """The same with DeepSpeed, each rank with its share of the rows."""
    from deepspeed import zero

    model = Two()
    weights = list(model.weights)
    made = engine(model, stage, optimizer=optimizer)
    before_step(made, lambda: change(weights))
    before_step(made, lambda: pytest.fail("a second function was taken"))
    rank = distributed.get_rank()
    for rows in data():
        made.backward(made(rows[2 * rank : 2 * rank + 2]))
        made.step()
    parted = [weight for weight in weights if hasattr(weight, "ds_id")]
    with zero.GatheredParameters(parted, enabled=bool(parted)):
        return [weight.detach().clone().tolist() for weight in weights]


def fixed(evenly):
    return lambda weights: fix_length(list(zip(weights, SCALINGS, strict=True)), evenly=evenly)


class Asked:
    """A policy whose hidden states are the model's outputs for the given rows."""

    looked = 0.05

    def __init__(self, model, rows):
        self.model, self.rows = model, rows

    def drawn_hidden(self):
        return self.model(self.rows)

    def apart(self, before, after):
        return (after - before).square() / 2

    def metric(self, name, value):
        assert name == "step/length" and value == value


class Rows(Two):
    """The same model with an output for each row."""

    def forward(self, x):
        for weight in self.weights:
            x = torch.tanh(x @ weight.T)
        return x.square().sum(-1)


LIMITS = {"policy": None, "braked": 0.02}


def policy_step(model, optimizer, *, rows, length):
    """Half the squared change of the outputs is 0.045 on average, or the step has that length if it is less."""
    scaled = list(zip(model.weights, SCALINGS, strict=True))
    step = PolicyStep(scaled, optimizer=optimizer, kl=0.045, length=length, evenly=True, policy=Asked(model, rows))
    step()


def policy_alone(length):
    model = Rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for rows in data():
        optimizer.zero_grad()
        model(rows).mean().backward()
        policy_step(model, optimizer, rows=rows, length=length)
        optimizer.step()
    return [weight.detach() for weight in model.weights]


def policy_under(stage, length):
    from deepspeed import zero

    model = Rows()
    made = engine(model, stage, optimizer=partial(torch.optim.SGD, lr=0.3))
    rank, now = distributed.get_rank(), {}
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    before_step(made, lambda: policy_step(model, plain, length=length, **now))
    for rows in data():
        now["rows"] = rows[2 * rank : 2 * rank + 2]
        made.backward(made(now["rows"]).mean())
        made.step()
    parted = [weight for weight in model.weights if hasattr(weight, "ds_id")]
    with zero.GatheredParameters(parted, enabled=bool(parted)):
        return [weight.detach().clone().tolist() for weight in model.weights]


def projected(weights):
    project_gradients(zip(weights, bases(), strict=True))


def projecting(weights, **options):
    return ProjectedSGD(list(zip(weights, bases(), strict=True)), lr=0.3, **options)


def refused(stage):
    """What `ProjectedSGD` itself says there, and whether the weights are as before."""
    model = Two()
    made = engine(model, stage, optimizer=projecting)
    made.backward(made(data()[0]))
    with pytest.raises(ValueError, match="project_gradients") as refusal:
        made.step()
    whole = [weight for weight in model.weights if weight.numel()]
    unchanged = all(torch.equal(a, b) for a, b in zip(Two().weights, whole, strict=False))
    return str(refusal.value), unchanged


def not_finite(stage):
    """What is said where one rank's gradient is not finite."""
    model = Two()
    made = engine(model, stage)
    before_step(made, lambda: fix_length([(w, 1.0) for w in model.weights], evenly=True))
    made.backward(made(data()[0]) * (float("nan") if distributed.get_rank() == 1 else 1.0))
    with pytest.raises(FloatingPointError) as error:
        made.step()
    return str(error.value)


def everything():
    """All that is looked at below, in one start of the processes."""
    sgd = partial(torch.optim.SGD, lr=0.3)
    found = {}
    for stage in range(4):
        for evenly in (True, False):
            found[f"length {stage} {evenly}"] = under(stage, fixed(evenly), optimizer=sgd)
        found[f"projection {stage}"] = under(stage, projected, optimizer=partial(sgd, momentum=0.5))
        found |= {f"{name} {stage}": policy_under(stage, length) for name, length in LIMITS.items()}
        found[f"not finite {stage}"] = not_finite(stage)
        if stage > 0:
            found[f"refused {stage}"] = refused(stage)
    return found | {"whole": under(0, lambda _: None, optimizer=projecting)}


@pytest.fixture(scope="module")
def ranks():
    return together(everything)


def same(ranks, name, expected):
    for found in ranks:
        for one, other in zip(found[name], expected, strict=True):
            close(torch.tensor(one), other)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("evenly", [True, False])
def test_a_step_of_fixed_length_is_the_same_in_every_stage(ranks, stage, evenly):
    def optimizer(weights):
        groups = [{"params": [w], "scaling": s} for w, s in zip(weights, SCALINGS, strict=True)]
        return StepLengthSGD(groups, lr=0.3, evenly=evenly)

    same(ranks, f"length {stage} {evenly}", alone(optimizer))


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", LIMITS)
def test_a_step_of_stated_divergence_is_the_same_in_every_stage(ranks, stage, name):
    same(ranks, f"{name} {stage}", policy_alone(LIMITS[name]))


@pytest.mark.parametrize("stage", range(4))
def test_projected_gradients_take_the_steps_of_projected_sgd_in_every_stage(ranks, stage):
    same(ranks, f"projection {stage}", alone(partial(projecting, momentum=0.5)))
    for one, start, basis in zip(ranks[0][f"projection {stage}"], Two().weights, bases(), strict=True):
        moved = torch.tensor(one) - start.detach()
        assert (moved - basis @ (basis.T @ moved)).norm() <= 1e-6 * moved.norm()


def test_projected_sgd_itself_is_right_under_stage_0(ranks):
    same(ranks, "whole", alone(projecting))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_projected_sgd_is_refused_by_name_where_weights_are_cut_to_pieces(ranks, stage):
    for said, unchanged in (found[f"refused {stage}"] for found in ranks):
        assert "ZeRO" in said and unchanged


@pytest.mark.parametrize("stage", range(4))
def test_a_gradient_that_is_not_finite_stops_every_rank(ranks, stage):
    assert all("the step was not taken" in found[f"not finite {stage}"] for found in ranks)
