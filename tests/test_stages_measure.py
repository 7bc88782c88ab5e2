"""What is read off a saved adapter, against brute force."""

import pytest
import torch
from forklora.recipes.stages_measure import distance, largest_gap, saved_update, share_outside, worst_outside
from peft import LoraConfig, get_peft_model

from forklora.adapter import KINDS, ForkLoraConfig
from forklora.bases import LayerBasis
from forklora.export import save_plain_lora
from tiny_policy import adapted, deltas, llama, orthonormal, random_bases, settings, shake


def projector(basis):
    basis = basis.double()
    return basis @ torch.linalg.inv(basis.T @ basis) @ basis.T


def test_the_share_outside_is_what_projectors_leave_over():
    delta = torch.randn(7, 5, dtype=torch.float64)
    u, q = torch.randn(7, 2), torch.randn(5, 3)  # any basis of the span will do
    size = delta.norm()
    for sides, inside in (
        ({"output": u}, projector(u) @ delta),
        ({"input": q}, delta @ projector(q)),
        ({"output": u, "input": q}, projector(u) @ delta @ projector(q)),
        ({}, delta),
    ):
        expected = float((delta - inside).norm() / size)
        assert share_outside(delta, **sides) == pytest.approx(expected, abs=1e-12)
        assert share_outside(inside, **sides) < 1e-6
    assert share_outside(torch.zeros(7, 5), output=u) is None


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_each_kind_is_inside_and_one_number_is_enough_to_be_outside(kind, tmp_path):
    bases = random_bases(llama(), width=6)
    model, _ = adapted(kind, bases=bases)
    shake(model)
    config = ForkLoraConfig(**settings(kind))
    update = saved_update(save_plain_lora(model, tmp_path))
    layers = {n: LayerBasis(u, u[0], q, q[0], 1.0, 1.0) for n, (u, q) in bases.items()}
    assert worst_outside(update, layers, config=config) < 1e-6
    name = list(update)[3]
    update[name][0, 0] += 1e-3 * update[name].norm()
    assert 1e-4 < worst_outside(update, layers, config=config) <= 1.1e-3
    assert worst_outside({name: 0 * update[name]}, layers, config=config) is None
    shapes = [basis.shape for basis in bases[name]]
    other = LayerBasis(*(part for s in shapes for part in (orthonormal(*s), torch.ones(s[1]))), 1.0, 1.0)
    assert worst_outside(update, layers | {name: other}, config=config) > 0.1


def test_the_update_is_the_one_peft_itself_adds(tmp_path):
    model = get_peft_model(llama(), LoraConfig(r=3, lora_alpha=7, target_modules="all-linear"))
    shake(model)
    model.save_pretrained(tmp_path)
    update = saved_update(tmp_path)
    assert update.keys() == deltas(model).keys() and len(update) == 14
    for name, delta in deltas(model).items():
        torch.testing.assert_close(update[name].float(), delta, rtol=1e-5, atol=1e-6)


def test_the_distance_is_that_of_all_numbers_in_one_row():
    one, other = ({n: torch.randn(3, 4, dtype=torch.float64) for n in "ab"} for _ in range(2))
    rows = [torch.cat([found[n].flatten() for n in "ab"]) for found in (one, other)]
    assert distance(one, other) == pytest.approx(float((rows[0] - rows[1]).norm() / rows[1].norm()))
    assert distance(other, other) == 0.0
    assert distance(one, {"a": other["a"]}) is None
    assert distance(one, {n: 0 * t for n, t in one.items()}) is None


def test_curves_of_different_length_have_no_gap():
    assert largest_gap([1.0, 2.0, 3.0], [1.0, 2.5, 2.75]) == 0.5
    assert largest_gap([1.0], [1.0, 2.0]) is largest_gap([], []) is None
