"""Laws of the forks: smallest candidate sets by brute force, covariances and bounds by enumeration of a vocabulary."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forklora.forks import candidate_sets, find_forks, fork_contexts, span_differences
from forklora.trace import Trace

V, D = 7, 5
ROWS = torch.randn(V, D, generator=torch.Generator().manual_seed(11))


def record(mu, *, kept=V, lengths=None):
    """The trace of one row per distribution list ``mu [n, t, v]``; token 0 of each position is called drawn."""
    mu = torch.as_tensor(mu)
    n, t, _ = mu.shape
    probs, ids = mu.topk(kept)
    mask = torch.arange(t) < torch.as_tensor([t] * n if lengths is None else lengths)[:, None]
    return Trace(
        prompt_ids=torch.tensor([[0, 1, 2]] * n),
        prompt_mask=torch.tensor([[False, True, True]] * n),
        completion_ids=torch.where(mask, ids[..., 0], 0),
        completion_mask=mask,
        candidate_ids=torch.where(mask[..., None] & (probs > 0), ids, -1),
        candidate_probs=torch.where(mask[..., None], probs, 0),
        leak=torch.where(mask, mu.scatter(-1, ids, 0).sum(-1), 0),
        logprob=torch.where(mask, probs[..., 0].log(), 0),
        spread=torch.zeros(n, t),
        group=torch.zeros(n, dtype=torch.long),
    )


def random_mu(seed, *shape, sharpness=3.0):
    return (sharpness * torch.randn(*shape, V, generator=torch.Generator().manual_seed(seed))).softmax(-1)


def covariance(mu, rows=ROWS):
    """Dense ``C = sum_a mu_a (w_a - mean)(w_a - mean)^T`` of one position, in float64."""
    mu, rows = mu.double(), rows.double()
    centered = rows - mu @ rows
    return centered.T @ (mu[:, None] * centered)


def projector(vectors):
    """Orthogonal projector on the span of the rows, in float64."""
    _, values, basis = torch.linalg.svd(vectors.double(), full_matrices=False)
    basis = basis[values > 1e-5 * values.max()]
    return basis.T @ basis


@pytest.mark.parametrize("mass", [0.3, 0.8, 0.98, 1.0])
@pytest.mark.parametrize("cap", [1, 3, V])
def test_a_candidate_set_is_the_smallest_that_reaches_the_mass(mass, cap):
    mu = random_mu(0, 4, 3, sharpness=2.0)
    sets = candidate_sets(record(mu), mass=mass, cap=cap)
    for row, position in torch.cartesian_prod(torch.arange(4), torch.arange(3)).tolist():
        probs = mu[row, position].double().tolist()
        reaching = [
            chosen
            for size in range(1, V + 1)
            for chosen in combinations(range(V), size)
            if sum(probs[a] for a in chosen) >= mass
        ]
        size = min([len(reaching[0]) if reaching else V, cap])
        best = max(combinations(range(V), size), key=lambda chosen: sum(probs[a] for a in chosen))
        at = row, position
        assert sets.size[at] == size and sets.ids.shape[-1] == cap
        assert set(sets.ids[at].tolist()) - {-1} == set(best) and (sets.ids[at][:size] >= 0).all()
        assert torch.equal(sets.probs[at][:size], mu[at].sort(descending=True).values[:size])
        assert (sets.probs[at][size:] == 0).all() and (sets.ids[at][size:] == -1).all()
        assert sets.leak[at].item() == pytest.approx(1 - sum(probs[a] for a in best), abs=1e-6)


def test_a_confident_position_has_one_candidate_and_padding_none():
    mu = torch.tensor([[[0.99, 0.01, 0, 0, 0, 0, 0], [0.6, 0.4, 0, 0, 0, 0, 0], [0.4, 0.3, 0.3, 0, 0, 0, 0]]])
    trace = record(mu, lengths=[2])
    sets = candidate_sets(replace(trace, leak=trace.leak.masked_fill(~trace.completion_mask, 0.5)))
    assert sets.size.tolist() == [[1, 2, 0]]
    assert sets.ids[0, :, :3].tolist() == [[0, -1, -1], [0, 1, -1], [-1, -1, -1]]
    assert sets.leak[0].tolist() == pytest.approx([0.01, 0, 0], abs=1e-7)


def test_a_token_without_probability_is_never_a_candidate():
    trace = record(torch.tensor([[[0.75, 0.25, 0, 0, 0, 0, 0]]]))
    listed = replace(trace, candidate_ids=torch.arange(V)[None, None])
    leaky = replace(
        listed,
        candidate_probs=0.9 * listed.candidate_probs,
        leak=0.1 + trace.leak,
        logprob=trace.logprob + torch.tensor(0.9).log(),
    )
    for one, leak in ((trace, 0), (listed, 0), (leaky, 0.1)):
        sets = candidate_sets(one, mass=1.0, cap=V)
        assert sets.size.item() == 2 and sets.leak.item() == pytest.approx(leak)


def test_a_trace_that_stores_too_little_says_so_by_its_leak():
    sets = candidate_sets(record(torch.full((1, 1, V), 1 / V), kept=2))
    assert sets.size.item() == 2 and sets.leak.item() == pytest.approx(5 / V)


@pytest.mark.parametrize("bad", [{"mass": 0.0}, {"mass": 1.1}, {"cap": 0}])
def test_masses_and_caps_without_meaning_are_refused(bad):
    with pytest.raises(ValueError, match="mass="):
        candidate_sets(record(random_mu(0, 1, 1)), **bad)


def as_list(forks, first_row=0):
    rows = [row + first_row for row in forks.rows.tolist()]
    columns = forks.positions, forks.ids, forks.probs, forks.leak
    return list(zip(rows, *(column.tolist() for column in columns), strict=True))


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1000),
    lengths=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    cut=st.integers(0, 4),
    extra=st.integers(1, 3),
)
def test_forks_do_not_depend_on_padding_or_on_the_split_of_the_batch(seed, lengths, cut, extra):
    mu = random_mu(seed, 4, 4)
    trace = record(mu, lengths=lengths)
    whole = as_list(find_forks(trace, cap=3))
    wider = record(torch.cat([mu, random_mu(seed + 1, 4, extra)], 1), lengths=lengths)
    garbage = replace(
        wider, candidate_probs=torch.where(wider.completion_mask[..., None], wider.candidate_probs, 1 / V)
    )
    alone = [find_forks(trace.select([row]), cap=3) for row in range(4)]
    halves = find_forks(trace.select(range(cut)), cap=3), find_forks(trace.select(range(cut, 4)), cap=3)
    assert as_list(find_forks(garbage, cap=3)) == whole
    assert as_list(halves[0]) + as_list(halves[1], cut) == whole
    assert [fork for row, forks in enumerate(alone) for fork in as_list(forks, row)] == whole
    assert all(position < lengths[row] for row, position, *_ in whole)


def test_forks_are_the_positions_with_two_or_more_candidates():
    trace = record(random_mu(3, 5, 4), lengths=[4, 0, 2, 3, 1])
    sets, forks = candidate_sets(trace, mass=0.9, cap=4), find_forks(trace, mass=0.9, cap=4)
    expected = [(r, p) for r in range(5) for p in range(4) if sets.size[r, p] >= 2]
    assert 0 < len(expected) < 10 and len(forks) == len(expected)
    assert torch.stack([forks.rows, forks.positions], 1).tolist() == [list(at) for at in expected]
    for i, at in enumerate(expected):
        assert torch.equal(forks.ids[i], sets.ids[at]) and torch.equal(forks.probs[i], sets.probs[at])
        assert forks.leak[i] == sets.leak[at]


def test_tool_tokens_are_no_forks():
    trace = record(torch.full((1, 3, V), 1 / V))
    masked = replace(trace, completion_mask=torch.tensor([[True, False, True]]))
    assert find_forks(masked).positions.tolist() == [0, 2]


def test_no_forks_is_an_answer():
    trace = record(torch.eye(V)[None, :3])
    forks = find_forks(trace)
    assert len(forks) == 0 and fork_contexts(trace, forks, decode=str) == []
    assert span_differences(forks, lambda ids: ROWS[ids]).shape == (0, D)
    assert len(find_forks(trace.select([]))) == 0


def test_selected_forks_are_the_same_forks():
    forks = find_forks(record(random_mu(4, 4, 4)))
    assert as_list(forks.select(slice(0, 3))) + as_list(forks.select(slice(3, None))) == as_list(forks)
    assert as_list(forks.select(forks.rows == 2)) == [fork for fork in as_list(forks) if fork[0] == 2]


def test_with_all_the_mass_the_differences_add_up_to_the_covariance():
    mu = random_mu(5, 3, 4, sharpness=1.0)
    forks = find_forks(record(mu), mass=1.0, cap=V)
    assert len(forks) == 12 and (forks.leak == 0).all()
    differences = span_differences(forks, lambda ids: ROWS[ids]).double()
    expected = sum(covariance(one) for one in mu.flatten(0, 1))
    assert torch.allclose(differences.T @ differences, expected, atol=1e-5)


def test_restricted_covariances_stay_below_the_whole_and_span_one_direction_less_than_candidates():
    mu = random_mu(6, 4, 4, sharpness=2.0)
    forks = find_forks(record(mu), mass=0.8, cap=4)
    assert len(forks) > 5
    for i in range(len(forks)):
        one = span_differences(forks.select(slice(i, i + 1)), lambda ids: ROWS[ids]).double()
        size = int((forks.ids[i] >= 0).sum())
        assert one.shape == (size, D) and torch.linalg.matrix_rank(one, rtol=1e-5) == size - 1
        among = forks.probs[i, :size] / forks.probs[i, :size].sum()
        within = forks.probs[i].sum().double() * covariance(among, ROWS[forks.ids[i, :size]])
        assert torch.allclose(one.T @ one, within, atol=1e-5)
        rest = covariance(mu[forks.rows[i], forks.positions[i]]) - one.T @ one
        assert torch.linalg.eigvalsh(rest).min() > -1e-5


def test_differences_ask_for_each_token_once_and_check_what_they_get():
    asked = []

    def rows_of(ids):
        asked.extend(ids.tolist())
        return ROWS[ids].bfloat16()

    forks = find_forks(record(random_mu(7, 4, 4)))
    assert span_differences(forks, rows_of).dtype == torch.float32
    assert span_differences(forks, lambda ids: ROWS[ids].double()).dtype == torch.float32
    assert sorted(asked) == sorted(set(forks.ids.flatten().tolist()) - {-1})
    with pytest.raises(ValueError, match=r"rows_of returned \[7, 5\]"):
        span_differences(forks.select(slice(0, 1)), lambda ids: ROWS)


@settings(max_examples=25)
@given(seed=st.integers(0, 1000), sharpness=st.floats(0.5, 20))
def test_the_spread_of_the_signal_is_bounded_by_what_the_sampler_is_unsure_of(seed, sharpness):
    """tr C <= sum_a mu_a |w_a - w_top|^2 <= 4 B^2 (1 - max mu): section 1 of "Low-rank in hidden space"."""
    mu = random_mu(seed, 1, 1, sharpness=sharpness)
    forks = find_forks(record(mu), mass=1.0, cap=V)
    spread = span_differences(forks, lambda ids: ROWS[ids]).square().sum().item()
    one, bound = mu[0, 0], ROWS.norm(dim=-1).max().item()
    about_top = (one * (ROWS - ROWS[one.argmax()]).square().sum(-1)).sum().item()
    assert spread <= about_top * (1 + 1e-4) + 1e-6
    assert about_top <= 4 * bound**2 * (1 - one.max().item()) * (1 + 1e-4) + 1e-6


@settings(max_examples=25)
@given(seed=st.integers(0, 1000), mass=st.floats(0.5, 0.99), cap=st.integers(2, 4))
def test_the_main_part_has_low_rank_and_the_rest_is_within_the_leak(seed, mass, cap):
    """rank(P C) <= dim D <= sum_t (|K_t| - 1) and E|(I - P) delta_t|^2 <= 4 B^2 rho_t, over every token drawn."""
    rows = torch.randn(V, 12, generator=torch.Generator().manual_seed(seed))
    mu = random_mu(seed, 1, 3)
    trace = record(mu)
    sets, forks = candidate_sets(trace, mass=mass, cap=cap), find_forks(trace, mass=mass, cap=cap)
    differences = span_differences(forks, lambda ids: rows[ids])
    main = projector(differences) if len(forks) else torch.zeros(12, 12, dtype=torch.float64)
    total = sum(covariance(one, rows) for one in mu[0])
    dimension = round(main.trace().item())
    assert torch.linalg.matrix_rank(main @ total, rtol=1e-7) <= dimension <= int((sets.size - 1).sum())
    bound = rows.norm(dim=-1).max().item()
    for position in range(3):
        rest = covariance(mu[0, position], rows)
        outside = (rest - main @ rest).trace().item()
        assert outside <= 4 * bound**2 * sets.leak[0, position].item() + 1e-6


def test_forks_between_the_same_tokens_are_one_kind():
    a, b = [0.6, 0.4, 0, 0, 0, 0, 0], [0.3, 0.7, 0, 0, 0, 0, 0]
    c, sure = [0, 0, 0.5, 0.3, 0.2, 0, 0], [0, 0, 0, 0, 1.0, 0, 0]
    trace = record(torch.tensor([[sure, a, c], [b, sure, sure]]))
    kinds = fork_contexts(trace, find_forks(trace), decode=lambda ids: "-".join(map(str, ids)))
    assert [(kind["context"], kind["count"]) for kind in kinds] == [("1-2-4", 2), ("1-2-4-0", 1)]
    assert [text for text, _ in kinds[0]["candidates"]] == ["1", "0"]
    assert [prob for _, prob in kinds[0]["candidates"]] == pytest.approx([0.55, 0.45])
    assert [text for text, _ in kinds[1]["candidates"]] == ["2", "3", "4"]
    assert len(fork_contexts(trace, find_forks(trace), decode=str, top=1)) == 1


def test_a_context_holds_tool_tokens_but_no_padding_and_is_short():
    trace = record(torch.full((1, 30, V), 1 / V))
    masked = replace(trace, completion_mask=torch.arange(30)[None] == 5, completion_ids=torch.arange(30)[None])
    masked = replace(masked, candidate_ids=torch.arange(5, 5 + V).expand(1, 30, V))
    (kind,) = fork_contexts(masked, find_forks(masked), decode=str)
    assert kind["context"] == str([1, 2, 0, 1, 2, 3, 4])
    late = find_forks(trace).select(slice(29, 30))
    assert fork_contexts(trace, late, decode=str)[0]["context"].count(",") == 15
