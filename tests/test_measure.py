"""Laws of the measures: matrices of known spectrum, brute-force rounding, explicit projectors, random nulls."""

import struct

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forklora.measure import (
    captured_share,
    numerical_rank,
    overlap,
    principal_angles,
    stable_rank,
    top_energy,
    unchanged_share,
)


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(0)


@pytest.fixture
def as_users_run_it(monkeypatch):
    """The shapes in signatures are not executed, so that the errors are those a user sees."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def frame(size, k, rng):
    """Random orthonormal columns."""
    return torch.linalg.qr(torch.randn(size, k, generator=rng, dtype=torch.float64)).Q


def with_spectrum(values, rng, shape=(30, 20)):
    values = torch.as_tensor(values, dtype=torch.float64)
    return frame(shape[0], len(values), rng) * values @ frame(shape[1], len(values), rng).T


def test_a_known_spectrum_gives_the_known_figures(rng):
    m = with_spectrum([4, 2, 2, 1], rng)
    assert numerical_rank(m) == 4
    assert stable_rank(m) == pytest.approx(25 / 16)
    assert [top_energy(m, k) for k in (1, 2, 3, 4, 99)] == pytest.approx([16 / 25, 20 / 25, 24 / 25, 1, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_weak_floor_of_noise_makes_the_rank_full_and_leaves_the_energy(rng, dtype):
    for floor, rank in ((1e-4, 20), (1e-6, 3)):
        m = with_spectrum([1.0] * 3 + [floor] * 17, rng).to(dtype)
        assert numerical_rank(m) == numerical_rank(1e4 * m) == rank and numerical_rank(m, tolerance=1e-3) == 3
        assert stable_rank(m) == pytest.approx(3, rel=1e-6) and top_energy(m, 3) == pytest.approx(1, rel=1e-6)


def test_the_top_sixteen_hold_their_share(rng):
    assert top_energy(torch.eye(64)) == pytest.approx(0.25) and stable_rank(torch.eye(64)) == pytest.approx(64)


def test_figures_that_do_not_exist_are_not_made_up(rng):
    zero = torch.zeros(3, 4)
    assert numerical_rank(zero) == 0
    for figure in (stable_rank, top_energy, captured_share):
        with pytest.raises(ValueError, match="is zero"):
            figure(zero)
    for figure in (stable_rank, numerical_rank):
        with pytest.raises(ValueError, match="NaN or infinity"):
            figure(zero / 0)
        with pytest.raises(ValueError, match=r"shape \[0, 4\]"):
            figure(zero[:0])
    with pytest.raises(ValueError, match="k=0"):
        top_energy(torch.eye(3), 0)
    with pytest.raises(ValueError, match="span nothing"):
        overlap(torch.ones(3, 1), torch.zeros(3, 1))


def rounded_to_bfloat16(value):
    """The upper 16 bits of a float32, rounded to nearest, ties to even; +0 and -0 are one number."""
    (word,) = struct.unpack("<I", struct.pack("<f", value))
    low, high = word & 0xFFFF, word >> 16
    high += low > 0x8000 or (low == 0x8000 and high & 1)
    return 0 if high & 0x7FFF == 0 else high


@settings(max_examples=50)
@given(
    pairs=st.lists(
        st.tuples(st.floats(-4, 4, width=32), st.sampled_from([0.0, 1e-4, 1e-3, 2e-3, 4e-3, 8e-3])), min_size=1
    )
)
def test_unchanged_means_equal_after_rounding_to_bfloat16(pairs):
    before = torch.tensor([value for value, _ in pairs])
    after = torch.tensor([value * (1 + change) for value, change in pairs])
    same = [
        rounded_to_bfloat16(a) == rounded_to_bfloat16(b) for a, b in zip(before.tolist(), after.tolist(), strict=True)
    ]
    assert unchanged_share(before, after) == pytest.approx(sum(same) / len(same))
    assert unchanged_share(before, before) == 1


def test_weights_stored_in_bfloat16_compare_with_those_stored_in_float32():
    before = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).bfloat16()
    after = torch.tensor([[1.001, 2.1], [-3.0, 4.001]])
    assert unchanged_share(before, after) == 0.5


def test_unchanged_within_a_relative_tolerance_is_as_stated():
    before = torch.tensor([1.0, 1.0, 0.0, -2.0, 0.0])
    after = torch.tensor([1.0009, 1.002, 1e-9, -2.0, 0.0])
    assert unchanged_share(before, after, relative=1e-3) == pytest.approx(3 / 5)
    assert unchanged_share(after, before, relative=1e-3) == pytest.approx(3 / 5)
    assert unchanged_share(torch.tensor([1.0]), torch.tensor([1.25]), relative=0.2) == 1


@pytest.mark.usefixtures("as_users_run_it")
def test_weights_that_cannot_be_compared_are_refused():
    for before, after in ((torch.ones(2), torch.ones(3)), (torch.ones(0), torch.ones(0))):
        with pytest.raises(ValueError, match="weights of one shape"):
            unchanged_share(before, after)
    with pytest.raises(ValueError, match="not finite"):
        unchanged_share(torch.ones(2), torch.tensor([1.0, float("nan")]))


def test_spans_overlap_by_what_they_share(rng):
    q = frame(12, 6, rng)
    mix = torch.randn(3, 3, generator=rng, dtype=torch.float64)
    assert overlap(q[:, :3], q[:, :3] @ mix) == pytest.approx(1)
    assert overlap(q[:, :3], q[:, 3:]) == pytest.approx(0, abs=1e-12)
    assert overlap(q[:, :2], q) == overlap(q, q[:, :2]) == pytest.approx(1)
    assert overlap(q[:, :3], q[:, 2:]) == pytest.approx(1 / 3)
    angle = torch.tensor(0.3, dtype=torch.float64)
    assert overlap(q[:, :1], (angle.cos() * q[:, :1] + angle.sin() * q[:, 1:2])) == pytest.approx(
        angle.cos().item() ** 2
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dependent_columns_and_their_rounding_count_once(rng, dtype):
    q = frame(40, 4, rng)
    weights = torch.rand(3, generator=rng, dtype=torch.float64).softmax(0)[:, None]
    dependent = (q[:, :3] - q[:, :3] @ weights).to(dtype)
    assert overlap(dependent, q[:, :3].to(dtype)) == pytest.approx(1, rel=1e-5)
    assert overlap(dependent, q[:, 3:].to(dtype)) == pytest.approx(0, abs=1e-6)
    assert overlap(torch.cat([dependent, dependent], 1), dependent) == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize(("k", "m"), [(1, 1), (2, 5), (6, 3)])
def test_random_spans_overlap_by_the_null(rng, k, m):
    draws = [overlap(torch.randn(24, k, generator=rng), torch.randn(24, m, generator=rng)) for _ in range(400)]
    mean = torch.tensor(draws).mean().item()
    assert mean == pytest.approx(k * m / (24 * min(k, m)), rel=0.15)


@pytest.mark.parametrize("sides", [("output",), ("input",), ("output", "input"), ()])
def test_the_captured_share_is_that_of_explicit_projectors(rng, sides):
    gradient = torch.randn(9, 7, generator=rng)
    bases = {"output": torch.randn(9, 3, generator=rng), "input": torch.randn(7, 2, generator=rng)}

    def projector(name, size):
        if name not in sides:
            return torch.eye(size, dtype=torch.float64)
        b = bases[name].double()
        return b @ torch.linalg.inv(b.T @ b) @ b.T

    inside = projector("output", 9) @ gradient.double() @ projector("input", 7)
    expected = inside.square().sum() / gradient.double().square().sum()
    assert captured_share(gradient, **{side: bases[side] for side in sides}) == pytest.approx(expected.item(), rel=1e-6)


def test_a_gradient_inside_its_bases_is_captured_whole(rng):
    u, q = frame(9, 2, rng), frame(7, 3, rng)
    assert captured_share(u @ torch.randn(2, 3, generator=rng, dtype=torch.float64) @ q.T, output=u, input=q) == (
        pytest.approx(1)
    )


@pytest.mark.usefixtures("as_users_run_it")
def test_bases_of_other_spaces_are_refused():
    with pytest.raises(ValueError, match=r"input basis \[9, 2\] does not fit the gradient \[9, 7\]"):
        captured_share(torch.ones(9, 7), input=torch.ones(9, 2))
    with pytest.raises(ValueError, match="length 3 and 4"):
        overlap(torch.ones(3, 1), torch.ones(4, 1))


def test_angles_between_spans_are_those_they_were_turned_by(rng):
    q, turned = frame(12, 6, rng), torch.tensor([1e-7, 0.3, 40.0, 89.0, 90.0])
    angles = turned.double().deg2rad()
    other = angles.cos() * q[:, :5] + angles.sin() * frame_beside(q, rng)
    mixed = other @ torch.randn(5, 5, generator=rng, dtype=torch.float64)
    assert principal_angles(q[:, :5], mixed).tolist() == pytest.approx(turned.tolist(), abs=1e-6)
    assert principal_angles(mixed, q[:, :5]).tolist() == pytest.approx(turned.tolist(), abs=1e-6)
    assert principal_angles(q[:, :2], q).tolist() == pytest.approx([0, 0], abs=1e-6)


def frame_beside(q, rng):
    """Five orthonormal columns orthogonal to all of q."""
    rest = torch.randn(len(q), 5, generator=rng, dtype=torch.float64)
    return torch.linalg.qr(rest - q @ (q.T @ rest)).Q


def test_angles_and_overlap_say_the_same(rng):
    a, b = torch.randn(20, 4, generator=rng), torch.randn(20, 7, generator=rng)
    cosines = principal_angles(a, b).deg2rad().cos()
    assert len(cosines) == 4
    assert overlap(a, b) == pytest.approx(float(cosines.square().mean()))


def test_angles_between_spans_of_different_spaces_are_refused(as_users_run_it):
    with pytest.raises(ValueError, match="different spaces"):
        principal_angles(torch.ones(3, 1), torch.ones(4, 1))
    with pytest.raises(ValueError, match="span nothing"):
        principal_angles(torch.ones(3, 1), torch.zeros(3, 1))


def test_weights_within_an_absolute_threshold_after_rounding_count_as_unchanged(as_users_run_it):
    before = torch.tensor([0.0, 0.0, 1.0, 1.0, 1e-3])
    after = torch.tensor([0.9e-5, 1.1e-5, 1.0 + 1e-3, 1.0 + 2**-7, 1e-3 + 0.9e-5])
    # the third is rounded back, the fourth is the next number; the last moves by less than the threshold
    assert unchanged_share(before, after, absolute=1e-5) == pytest.approx(3 / 5)
    assert unchanged_share(before, after) == pytest.approx(1 / 5)
    with pytest.raises(ValueError, match="two definitions"):
        unchanged_share(before, after, absolute=1e-5, relative=1e-3)
