"""Laws of the sketch: equal to dense linear algebra, additive, seeded, and honest about what it cannot know."""

import random

import jaxtyping
import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forklora.sketch import Sketch


def decaying(size, *, power=2.0, seed=0):
    """Vectors whose sum of outer products has eigenvalues ``j^-power`` in a random frame, and that matrix."""
    rng = torch.Generator().manual_seed(seed)
    frame = torch.linalg.qr(torch.randn(size, size, generator=rng, dtype=torch.float64)).Q
    values = torch.arange(1, size + 1, dtype=torch.float64) ** -power
    mixing = torch.linalg.qr(torch.randn(size, size, generator=rng, dtype=torch.float64)).Q
    return mixing @ (frame * values.sqrt()).T, (frame * values) @ frame.T


def sketched(vectors, weights=None, *, width, seed=0):
    sketch = Sketch(vectors.shape[1], width=width, seed=seed)
    sketch.add(vectors, weights)
    return sketch


def same(a, b):
    """Equal up to float64 rounding of the sums."""
    assert a.trace == pytest.approx(b.trace, rel=1e-12) and a.count == b.count
    (values, vectors), (others, other) = a.eigenbasis(4), b.eigenbasis(4)
    return torch.allclose(values, others, rtol=1e-9) and torch.allclose(vectors, other, atol=1e-6)


@pytest.mark.parametrize("width", [12, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_width_that_reaches_the_size_gives_the_dense_eigenbasis(width, dtype):
    rng = torch.Generator().manual_seed(1)
    scale = torch.linspace(1, 3, 12)
    vectors, weights = (torch.randn(100, 12, generator=rng) * scale).to(dtype), torch.rand(100, generator=rng)
    values, basis = sketched(vectors, weights, width=width).eigenbasis(12)
    dense = torch.einsum("n,ni,nj->ij", weights.double(), vectors.double(), vectors.double())
    expected, frame = torch.linalg.eigh(dense)
    assert values.dtype == torch.float64 and basis.dtype == torch.float32
    assert torch.allclose(values, expected.flip(0), rtol=1e-10)
    for column, vector in zip(frame.flip(1).T, basis.T.double(), strict=True):
        largest = max(range(12), key=lambda i: abs(column[i].item()))
        assert torch.allclose(vector, column * column[largest].sign(), atol=1e-6)
        assert vector[largest] > 0


def test_weights_of_one_are_no_weights_and_zero_weights_no_vectors():
    vectors, _ = decaying(20)
    weights = torch.ones(20)
    weights[10:] = 0
    assert same(sketched(vectors, torch.ones(20), width=8), sketched(vectors, width=8))
    partly = sketched(vectors, weights, width=8)
    assert torch.allclose(partly.eigenbasis(4)[0], sketched(vectors[:10], width=8).eigenbasis(4)[0])
    assert partly.count == 20


def test_trace_and_count_are_those_of_everything_added():
    vectors, dense = decaying(20)
    sketch = sketched(vectors, width=3)
    assert sketch.trace == pytest.approx(dense.trace().item()) and sketch.count == 20
    sketch.add(2 * vectors[:5], torch.full((5,), 0.5))
    more = 2 * vectors[:5].square().sum().item()
    assert sketch.trace == pytest.approx(dense.trace().item() + more) and sketch.count == 25


@settings(max_examples=20)
@given(cut=st.integers(0, 30), seed=st.integers(0, 1000), width=st.sampled_from([8, 30]))
def test_halves_merged_equal_the_whole_in_any_order(cut, seed, width):
    vectors, _ = decaying(30, seed=seed)
    whole = sketched(vectors, width=width)
    first, second = sketched(vectors[:cut], width=width), sketched(vectors[cut:], width=width)
    first.merge(second)
    shuffled = vectors[torch.randperm(30, generator=torch.Generator().manual_seed(seed))]
    assert same(first, whole) and same(sketched(shuffled, width=width), whole)


def test_more_vectors_than_are_widened_at_a_time_lose_nothing():
    vectors = torch.randn(5000, 6, generator=torch.Generator().manual_seed(0))
    weights = torch.rand(5000, generator=torch.Generator().manual_seed(1))
    dense = vectors.double().T @ (weights[:, None].double() * vectors.double())
    sketch = sketched(vectors, weights, width=6)
    assert torch.allclose(sketch.spectrum(6), torch.linalg.eigvalsh(dense).flip(0)) and sketch.count == 5000


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("k", "power"), [(2, 3.0), (8, 2.0), (16, 2.0)])
def test_a_width_of_four_times_k_captures_a_decaying_spectrum_within_one_percent(k, power, seed):
    vectors, dense = decaying(300, power=power, seed=seed)
    values, basis = sketched(vectors, width=4 * k, seed=seed).eigenbasis(k)
    best = torch.linalg.eigvalsh(dense).flip(0)[:k]
    captured = (basis.double().T @ dense @ basis.double()).trace()
    assert best.sum() * (1 + 1e-6) >= captured >= 0.99 * best.sum()
    assert (values <= best * (1 + 1e-9)).all() and values.sum() >= 0.95 * best.sum()
    assert torch.allclose(basis.T @ basis, torch.eye(k), atol=1e-5)


@pytest.mark.parametrize("width", [10, 29, 30])
def test_a_rank_below_the_width_is_found_exactly_and_more_is_refused_by_number(width):
    rng = torch.Generator().manual_seed(2)
    vectors = torch.randn(50, 4, generator=rng) @ torch.randn(4, 30, generator=rng)
    exact = torch.linalg.svdvals(vectors.double())[:4].square()
    sketch = sketched(vectors, width=width)
    assert torch.allclose(sketch.eigenbasis(4)[0], exact, rtol=1e-6)
    with pytest.raises(ValueError, match=f"asked for 5 directions, but only 4 carry .* width {width} .* 50 vectors"):
        sketch.eigenbasis(5)


def test_the_floor_of_energy_is_ten_orders_below_the_largest():
    strengths = torch.tensor([1.0, 1e-4, 2e-5, 0.5e-5, 1e-6])
    for width in (5, 6, 20):
        sketch = sketched(torch.eye(20)[:5] * strengths[:, None], width=width)
        assert sketch.eigenbasis(3)[0].tolist() == pytest.approx([1, 1e-8, 4e-10], rel=0.05)
        with pytest.raises(ValueError, match="only 3 carry energy"):
            sketch.eigenbasis(4)


def test_the_sum_to_zero_of_rounded_differences_is_no_direction():
    rng = torch.Generator().manual_seed(3)
    rows, mu = 10 + torch.randn(5, 40, generator=rng), torch.rand(5, generator=rng).softmax(0)
    sketch = sketched(mu.sqrt()[:, None] * (rows - mu @ rows), width=20)
    assert len(sketch.eigenbasis(4)[0]) == 4
    with pytest.raises(ValueError, match="only 4"):
        sketch.eigenbasis(5)


def test_more_directions_than_columns_and_none_at_all_are_refused():
    sketch = sketched(decaying(30)[0], width=6)
    assert sketch.eigenbasis(6)[1].shape == (30, 6) and len(sketch.spectrum(99)) == 6
    for k in (0, 7):
        with pytest.raises(ValueError, match=f"asked for {k} directions, but only 6 .* width 6"):
            sketch.eigenbasis(k)


def test_an_empty_or_zero_or_broken_sketch_has_no_basis():
    empty, zero = Sketch(5, width=2, seed=0), sketched(torch.zeros(3, 5), width=5)
    broken = sketched(torch.full((1, 5), float("nan")), width=2)
    for sketch, message in ((empty, "zero .0 vectors"), (zero, "zero .3 vectors"), (broken, "NaN or infinity")):
        with pytest.raises(ValueError, match=message):
            sketch.eigenbasis(1)


@pytest.mark.parametrize("width", [8, 30])
def test_where_fewer_directions_carry_energy_the_leading_ones_are_those(width):
    sketch = sketched(decaying(30)[0][:4], width=width)
    assert sketch.available == 4
    for k in (1, 4, 9):
        for found, expected in zip(sketch.leading(k), sketch.eigenbasis(min(k, 4)), strict=True):
            assert torch.equal(found, expected)


def test_nothing_added_has_no_leading_direction_and_what_is_not_finite_is_refused():
    for empty in (Sketch(5, width=2, seed=0), sketched(torch.zeros(3, 5), width=5)):
        values, vectors = empty.leading(3)
        assert empty.available == 0 and values.shape == (0,) and vectors.shape == (5, 0)
    with pytest.raises(ValueError, match="NaN or infinity"):
        sketched(torch.full((1, 5), float("nan")), width=2).leading(1)


def test_the_spectrum_is_what_the_basis_says_and_never_negative():
    sketch = sketched(decaying(30)[0][:4], width=12)
    assert torch.equal(sketch.spectrum(4), sketch.eigenbasis(4)[0])
    assert (sketch.spectrum(12) >= 0).all() and sketch.spectrum(12).diff().max() <= 0


def test_omega_depends_on_size_width_and_seed_only():
    states = torch.get_rng_state(), numpy.random.get_state()[1].tolist(), random.getstate()
    vectors, _ = decaying(30)
    first = sketched(vectors, width=6, seed=5).eigenbasis(6)[1]
    assert torch.equal(torch.get_rng_state(), states[0])
    assert numpy.random.get_state()[1].tolist() == states[1] and random.getstate() == states[2]
    torch.rand(3)
    assert torch.equal(sketched(vectors, width=6, seed=5).eigenbasis(6)[1], first)
    assert not torch.allclose(sketched(vectors, width=6, seed=6).eigenbasis(6)[1], first, atol=1e-3)


def test_sketches_of_other_sums_are_not_merged():
    sketch = Sketch(5, width=2, seed=0)
    for other in (Sketch(6, width=2, seed=0), Sketch(5, width=3, seed=0), Sketch(5, width=2, seed=1)):
        with pytest.raises(ValueError, match=r"\(5, 2, 0\) and .* cannot be merged"):
            sketch.merge(other)


def test_what_is_no_sum_of_outer_products_is_refused(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    sketch = Sketch(5, width=2, seed=0)
    faults = {
        r"shape \[3, 4\], but the sketch takes \[n, 5\]": (torch.ones(3, 4), None),
        r"shape \[5\], but": (torch.ones(5), None),
        r"weights have shape \[2\], but there are 3": (torch.ones(3, 5), torch.ones(2)),
        "must not be negative": (torch.ones(3, 5), torch.tensor([1.0, -1e-9, 1.0])),
        "or NaN": (torch.ones(3, 5), torch.tensor([1.0, float("nan"), 1.0])),
    }
    for message, arguments in faults.items():
        with pytest.raises(ValueError, match=message):
            sketch.add(*arguments)
    assert sketch.count == 0 and sketch.trace == 0
    for size, width in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match=f"size={size}, width={width}"):
            Sketch(size, width=width, seed=0)


def test_without_a_process_group_there_is_nothing_to_reduce():
    vectors, _ = decaying(30)
    sketch = sketched(vectors, width=8)
    sketch.all_reduce()
    assert same(sketch, sketched(vectors, width=8))


def _rank(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    vectors, _ = decaying(30)
    sketches = [sketched(part, width=8) for part in (vectors[: 30 * rank], vectors[rank::2])]
    for sketch in sketches:
        sketch.all_reduce()
    torch.save([(s.eigenbasis(4), s.trace, s.count) for s in sketches], f"{folder}/{rank}")
    torch.distributed.destroy_process_group()


def test_ranks_end_with_the_same_bits_also_where_one_has_nothing_to_add(tmp_path):
    torch.multiprocessing.spawn(_rank, (str(tmp_path),), nprocs=2)
    zero, one = (torch.load(tmp_path / str(rank)) for rank in range(2))
    whole = sketched(decaying(30)[0], width=8)
    for (mine, *facts), (theirs, *others) in zip(zero, one, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)) and facts == others
        assert torch.allclose(mine[0], whole.eigenbasis(4)[0], rtol=1e-9)
        assert torch.allclose(mine[1], whole.eigenbasis(4)[1], atol=1e-6)
        assert facts == [pytest.approx(whole.trace), 30]


@pytest.mark.parametrize("width", [5, 40])
def test_rows_joined_by_a_gram_matrix_add_the_outer_product_of_their_matrix(width):
    """``V^T (X X^T) V`` is ``M M^T`` for ``M = V^T X``, in the product and in the trace."""
    generator = torch.Generator().manual_seed(3)
    v, x = (torch.randn(6, 7, d, generator=generator) for d in (40, 12))
    joined, explicit = (Sketch(40, width=width, seed=1) for _ in range(2))
    joined.add_rows(v, x @ x.mT)
    explicit.add((v.mT @ x).mT.flatten(0, 1))  # the columns of every M
    assert torch.allclose(joined.spectrum(5), explicit.spectrum(5), rtol=1e-4)
    assert joined.trace == pytest.approx(explicit.trace, rel=1e-5)
    with pytest.raises(ValueError, match=r"\[6, 7, 40\].*\[6, 7, 12\]"):
        joined.add_rows(v, x)
