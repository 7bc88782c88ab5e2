"""Known matrices give known figures, exactly and by the randomized way; chance overlaps as chance does."""

import pytest
import torch

from forklora import spectra
from forklora.measure import captured_share, numerical_rank, stable_rank, top_energy
from forklora.spectra import principal_overlap, random_shares, rotation, spectrum, unchanged

EXACT, RANDOMIZED = {"exact": 1024}, {"exact": 0}


def orthonormal(size, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(size, count, dtype=torch.float64, generator=generator)).Q


def of_values(values, shape=(40, 30), seed=0):
    """A matrix with the given singular values, and its vectors."""
    u, v = orthonormal(shape[0], len(values), seed), orthonormal(shape[1], len(values), seed + 1)
    return u @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ v.T, u, v


@pytest.mark.parametrize("way", [EXACT, RANDOMIZED])
@pytest.mark.parametrize("shape", [(40, 30), (30, 40), (400, 90)])
def test_a_matrix_of_known_values_gives_known_figures(way, shape):
    matrix, u, v = of_values([4.0, 2.0, 1.0, 0.5], shape)
    found = spectrum(matrix, top=2, **way)
    assert found.norm == pytest.approx(21.25**0.5, rel=1e-12)
    assert found.spectral_norm == pytest.approx(4, rel=1e-9)
    assert found.stable_rank == pytest.approx(21.25 / 16, rel=1e-9)
    assert found.top_energy == pytest.approx(20 / 21.25, rel=1e-9)
    assert found.numerical_rank == (4 if way is EXACT else None)
    assert found.exact == (way is EXACT) and (found.error == 0 if way is EXACT else found.error <= 1e-3)
    assert torch.allclose((found.left.T @ u[:, :2]).abs(), torch.eye(2, dtype=torch.float64), atol=1e-5)
    assert torch.allclose((found.right.T @ v[:, :2]).abs(), torch.eye(2, dtype=torch.float64), atol=1e-5)


def test_the_exact_way_is_the_other_room_s():
    matrix = torch.randn(30, 50, generator=torch.Generator().manual_seed(1))
    found = spectrum(matrix, top=5)
    assert found.stable_rank == pytest.approx(stable_rank(matrix), rel=1e-12)
    assert found.top_energy == pytest.approx(top_energy(matrix, 5), rel=1e-12)
    assert found.numerical_rank == numerical_rank(matrix) == 30


@pytest.mark.parametrize("way", [EXACT, RANDOMIZED])
def test_outer_products_have_one_direction_and_rotations_all_alike(way):
    outer = torch.outer(torch.arange(1.0, 41), torch.arange(1.0, 31))
    found = spectrum(outer, **way)
    assert found.stable_rank == pytest.approx(1, rel=1e-6) and found.top_energy == pytest.approx(1, rel=1e-6)
    assert found.left.shape == (40, 1) and found.right.shape == (30, 1)  # rounding is no direction
    turn = orthonormal(32, 32)
    found = spectrum(turn, top=4, **way)
    assert found.stable_rank == pytest.approx(32, rel=1e-9) and found.top_energy == pytest.approx(4 / 32, rel=1e-9)


def test_a_zero_matrix_is_a_case_of_its_own():
    found = spectrum(torch.zeros(5, 4))
    assert (found.norm, found.spectral_norm, found.numerical_rank, found.exact) == (0, 0, 0, True)
    assert found.stable_rank is found.top_energy is found.left is found.right is None
    assert rotation(found, spectrum(torch.eye(4))) is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_matrix_of_numbers_is_refused(bad):
    matrix = torch.eye(4)
    matrix[1, 2] = bad
    for way in (EXACT, RANDOMIZED):
        with pytest.raises(ValueError, match="NaN or infinity"):
            spectrum(matrix, **way)
    with pytest.raises(ValueError, match="entries"):
        spectrum(torch.zeros(0, 4))
    with pytest.raises(ValueError, match="top"):
        spectrum(torch.eye(4), top=0)


def test_the_stated_error_holds_where_values_lie_close():
    matrix = torch.randn(300, 260, generator=torch.Generator().manual_seed(2))
    true = torch.linalg.svdvals(matrix.double())
    found = spectrum(matrix, top=8, exact=0)
    assert 0 < found.error < 0.3  # a flat spectrum: the vectors are not settled, and it says so
    assert found.spectral_norm <= float(true[0]) * (1 + 1e-5)
    assert found.spectral_norm == pytest.approx(float(true[0]), rel=found.error)
    for value in torch.linalg.svdvals(matrix.double() @ found.right.double()):
        assert ((true - value).abs() / value).min() <= found.error
    assert found.top_energy == pytest.approx(spectrum(matrix, top=8).top_energy, rel=0.02)


def test_the_random_state_is_left_alone_and_a_seed_says_all():
    matrix = torch.randn(60, 50, generator=torch.Generator().manual_seed(3))
    state = torch.get_rng_state()
    first, second = spectrum(matrix, exact=0, seed=4), spectrum(matrix, exact=0, seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.left, second.left) and first.error == second.error


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 0.01), (torch.float16, 2e-3)])
@pytest.mark.parametrize("way", [EXACT, RANDOMIZED])
def test_figures_depend_on_the_storage_by_its_rounding_only(dtype, bound, way):
    matrix, _, _ = of_values([4.0, 2.0, 1.0, 0.5])
    found, stored = spectrum(matrix, **way), spectrum(matrix.to(dtype), **way)
    for name in ("norm", "spectral_norm", "stable_rank", "top_energy"):
        assert getattr(stored, name) == pytest.approx(getattr(found, name), rel=bound)


def test_unchanged_weights_by_three_definitions(monkeypatch):
    before = torch.tensor([1.0, 1.0, 1.0, 1e-4, 0.0, 1.0])
    after = torch.tensor([1.0, 1.0005, 1.0078125, 1.05e-4, 0.0, 1.002])
    for piece in (2, 4, 1 << 20):  # however it is cut
        monkeypatch.setattr(spectra, "_PIECE", piece)
        found = unchanged(before.view(2, 3), after.view(2, 3))
        assert found.bf16 == pytest.approx(4 / 6)  # neighbors of 1 in bfloat16 are 2^-7 apart
        assert found.relative == pytest.approx(3 / 6)
        assert found.absolute == pytest.approx(5 / 6)


def test_on_bfloat16_the_relative_rule_is_equality():
    generator = torch.Generator().manual_seed(5)
    before = torch.randn(50, 40, generator=generator).bfloat16()
    after = (before.float() * (1 + 2e-3 * torch.randn(50, 40, generator=generator))).bfloat16()
    found = unchanged(before, after)
    assert 0.2 < found.bf16 == found.relative < 0.98
    with pytest.raises(ValueError, match="shape"):
        unchanged(torch.zeros(0), torch.zeros(0))


def test_overlap_counts_shared_directions_beside_chance():
    q = orthonormal(50, 10)
    assert principal_overlap(q[:, :4], q[:, 2:8]) == (pytest.approx(0.5), pytest.approx(6 / 50))
    assert principal_overlap(q[:, :1], q[:, 4:8])[0] == pytest.approx(0, abs=1e-12)
    chance = [principal_overlap(orthonormal(50, 4, s), orthonormal(50, 6, s + 1000)) for s in range(200)]
    values = torch.tensor([share for share, _ in chance])
    assert abs(float(values.mean()) - 6 / 50) < 4 * float(values.std()) / 200**0.5


@pytest.mark.parametrize("way", [EXACT, RANDOMIZED])
def test_a_weight_that_is_turned_by_a_known_angle_has_turned_by_it(way):
    matrix, u, _ = of_values([8.0, 4.0], seed=6)
    angle = torch.tensor(30.0).deg2rad()
    aside = orthonormal(40, 3, seed=9)
    aside = (aside - u @ (u.T @ aside))[:, 0]
    turned = u.clone()
    turned[:, 0] = angle.cos() * u[:, 0] + angle.sin() * aside / aside.norm()
    after = turned @ u.T @ matrix
    base, tuned = spectrum(matrix, top=2, **way), spectrum(after, top=2, **way)
    found = rotation(base, tuned)
    assert (found.left_mean, found.left_largest) == (pytest.approx(15, abs=1e-3), pytest.approx(30, abs=1e-3))
    assert found.right_largest == pytest.approx(0, abs=1e-3)
    assert rotation(base, base).left_largest == pytest.approx(0, abs=1e-5)


def test_random_spans_hold_what_their_own_projections_say():
    delta = torch.randn(24, 18, generator=torch.Generator().manual_seed(7))
    found = random_shares(delta, output=3, input=2, draws=400, seed=1)
    generator = torch.Generator().manual_seed(1)
    lefts = [torch.linalg.qr(torch.randn(24, 3, dtype=torch.float64, generator=generator)).Q for _ in range(400)]
    rights = [torch.linalg.qr(torch.randn(18, 2, dtype=torch.float64, generator=generator)).Q for _ in range(400)]
    for draw in (0, 1, 399):
        u, q = lefts[draw], rights[draw]
        sides = {"output": u}, {"input": q}, {"output": u, "input": q}
        assert found[draw].tolist() == pytest.approx([captured_share(delta, **side) for side in sides], rel=1e-5)
    means, spread = found.mean(0), found.std(0) / 400**0.5
    for mean, error, chance in zip(means, spread, (3 / 24, 2 / 18, 3 / 24 * 2 / 18), strict=True):
        assert abs(float(mean) - chance) < 4 * float(error)
    with pytest.raises(ValueError, match="do not fit"):
        random_shares(delta, output=25, input=2)
    with pytest.raises(ValueError, match="zero"):
        random_shares(torch.zeros(4, 4), output=1, input=1)
