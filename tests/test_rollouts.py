"""Laws of the sampler: what is recorded is what was drawn from, row by row, whatever else is in the batch."""

import pytest
import torch

import tiny
from forklora import drawing
from forklora.drawing import draw, likeliest
from forklora.rollouts import Sampler, pad_prompts, sample, stop_at
from forklora.unembed import read_unembedding
from tiny import HIDDEN, KINDS, NEWLINE, RECURRENT, VOCABULARY, WORDS, Wrapper, close

SETTINGS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 4, "temperature": 1.7},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "penalty": {"repetition_penalty": 1.8},
    "all": {"temperature": 1.4, "top_k": 6, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3},
}


def uniform(count):
    return torch.rand(count, dtype=torch.float64)


def distributions(net, trace, *, row, sampler):
    """``mu`` at each position of one row, from the row alone without padding, by transformers' own processors."""
    _, logits = tiny.alone(net, trace, row)
    prompt = trace.prompt_ids[row][trace.prompt_mask[row]]
    ids = torch.cat([prompt, trace.completion_ids[row][trace.completion_mask[row]]])[None]
    found = []
    for t, scores in enumerate(logits.detach()[:, None]):
        for processor in sampler.pipeline():
            scores = processor(ids[:, : len(prompt) + t], scores)
        found.append(scores[0].softmax(-1))
    return torch.stack(found)


@pytest.mark.parametrize("settings", SETTINGS)
def test_tokens_come_as_often_as_recorded(settings):
    torch.manual_seed(1)
    draws = 20_000
    sampler = Sampler(max_new_tokens=1, keep=VOCABULARY, **SETTINGS[settings])
    trace = sample(tiny.model(), [[3, 1, 3]], sampler=sampler, group=draws, record=False)
    ids, mu = trace.candidate_ids[0, 0], trace.candidate_probs[0, 0]
    count = torch.bincount(trace.completion_ids[:, 0], minlength=VOCABULARY)
    used = ids[ids >= 0]
    assert count[used].sum() == draws, "a token without mass was drawn"
    expected = draws * mu[ids >= 0]
    chi_square = ((count[used] - expected) ** 2 / expected)[expected > 5].sum()
    assert chi_square < 40  # at most 12 degrees of freedom: exceeded once in ten thousand seeds


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_recorded_distribution_is_that_of_transformers_own_generation(settings):
    torch.manual_seed(2)
    net, asked = tiny.model(), SETTINGS[settings]
    trace = sample(net, [[3, 1, 3]], sampler=Sampler(max_new_tokens=4, keep=VOCABULARY, **asked), group=4)
    for row in range(4):
        for t in range(4):
            prefix = torch.cat([trace.prompt_ids[row], trace.completion_ids[row, :t]])[None]
            scores = net.generate(
                prefix,
                attention_mask=torch.ones_like(prefix),
                do_sample=True,
                max_new_tokens=1,
                output_scores=True,
                return_dict_in_generate=True,
                **{"top_k": 0} | asked,
            ).scores[0]
            mu, ids = scores[0].softmax(-1), trace.candidate_ids[row, t]
            assert set(ids[ids >= 0].tolist()) == set(mu.nonzero()[:, 0].tolist())
            close(trace.candidate_probs[row, t], torch.where(ids >= 0, mu[ids.clamp_min(0)], 0))


@pytest.mark.parametrize("settings", ["plain", "all"])
@pytest.mark.parametrize("kind", [*KINDS, *RECURRENT])
def test_rows_in_a_padded_shared_batch_are_rows_alone(kind, settings):
    torch.manual_seed(3)
    net, sampler = tiny.model(kind), Sampler(max_new_tokens=5, stop_ids=(2, 7), keep=3, **SETTINGS[settings])
    head = read_unembedding(net)
    trace = sample(Wrapper(net), tiny.prompts((1, 6, 3)), sampler=sampler, group=2)
    for row in range(len(trace)):
        length = int(trace.completion_mask[row].sum())
        mu = distributions(net, trace, row=row, sampler=sampler)
        tokens = trace.completion_ids[row, :length]
        probs, ids = mu.topk(3)
        assert torch.equal(trace.candidate_ids[row, :length], torch.where(probs > 0, ids, -1))
        close(trace.candidate_probs[row, :length], probs)
        close(trace.logprob[row, :length].exp(), mu.gather(1, tokens[:, None])[:, 0])
        leak = mu.scatter(1, ids, 0).sum(-1)
        assert (trace.leak[row, :length] - leak).abs().max() < 1e-5
        _, logits = tiny.alone(net, trace, row)
        delta, spread = head.signal(mu, tokens, logits=logits.detach())
        close(trace.delta[row, :length] * sampler.temperature, delta, 1e-4)
        assert torch.allclose(trace.spread[row, :length] * sampler.temperature**2, spread, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("settings", ["plain", "temperature", "top_p"])
@pytest.mark.parametrize("kind", KINDS)
def test_delta_is_the_derivative_of_the_centered_logit_by_the_hidden_state(kind, settings):
    torch.manual_seed(4)
    net, sampler = tiny.model(kind), Sampler(max_new_tokens=3, **SETTINGS[settings])
    trace = sample(net, tiny.prompts((4,)), sampler=sampler)
    mu = distributions(net, trace, row=0, sampler=sampler)
    hidden = tiny.alone(net, trace, 0)[0].detach().requires_grad_(True)
    z = read_unembedding(net).logits(hidden) / sampler.temperature
    centered = z.gather(1, trace.completion_ids[0, :, None])[:, 0] - (mu * z).sum(-1)
    close(trace.delta[0], torch.autograd.grad(centered.sum(), hidden)[0])


def test_tokens_put_to_no_mass_are_never_drawn():
    torch.manual_seed(5)
    mu = torch.zeros(5000, 6)
    mu[:, [1, 4]] = torch.tensor([1e-6, 1 - 1e-6])
    assert set(draw(mu, uniform(5000)).tolist()) <= {1, 4}
    assert draw(torch.eye(6), uniform(6)).tolist() == list(range(6))
    rare = draw(torch.tensor([[0.25, 0.0, 0.75]]), uniform(20_000), of=torch.zeros(20_000, dtype=torch.long))
    assert abs((rare == 0).float().mean() - 0.25) < 0.015

    def forbid(_, scores):
        return scores.index_fill(1, torch.arange(0, VOCABULARY, 2), -torch.inf)

    trace = sample(tiny.model(), [[1]], sampler=Sampler(max_new_tokens=6, processors=[forbid]), group=200)
    assert (trace.completion_ids % 2 == 1).all() and trace.delta.isfinite().all()
    assert trace.candidate_probs.sum(-1).allclose(torch.ones(200, 6))


@pytest.mark.parametrize("edge", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("size", [5, 256, 257, 700])
def test_the_ends_of_the_uniform_draw_fall_on_tokens_with_mass(edge, size):
    mu = torch.zeros(1, size)
    mu[0, [1, size - 2]] = torch.tensor([0.1, 0.2])
    assert draw(mu, torch.tensor([edge], dtype=torch.float64)).item() == (1 if edge == 0 else size - 2)


@pytest.mark.parametrize("size", [7, 256, 1000])
def test_a_draw_inverts_the_cumulative_distribution(size):
    torch.manual_seed(15)
    mu = (8 * torch.randn(3, size)).softmax(-1)
    mu[1, : size // 2] = 0
    of = torch.randint(3, (4000,))
    luck = uniform(4000)
    total = mu.double().cumsum(-1)
    expected = torch.searchsorted(total[of], luck[:, None] * total[of, -1:], right=True)[:, 0]
    assert (draw(mu, luck, of=of) == expected).float().mean() > 0.999  # float32 sums of blocks move an edge by 1e-7


@pytest.mark.parametrize("size", [5, 255, 256, 2000])
@pytest.mark.parametrize("keep", [1, 4, 9])
def test_the_likeliest_are_the_largest(size, keep):
    mu = torch.rand(6, size, generator=torch.Generator().manual_seed(size))
    mu[0, 3:] = 0  # fewer tokens with mass than asked for
    probs, ids = likeliest(mu, keep)
    expected = mu.topk(min(keep, size)).values
    assert torch.equal(probs, expected) and torch.equal(mu.gather(1, ids), expected)


def test_how_rows_are_blocked_changes_nothing(monkeypatch):
    traces = []
    for alive in (1 << 23, 2 * VOCABULARY):
        monkeypatch.setattr(drawing, "_ALIVE", alive)
        torch.manual_seed(16)
        sampler = Sampler(max_new_tokens=5, stop_ids=(2, 7), repetition_penalty=1.3)
        traces.append(sample(tiny.model(), tiny.prompts((1, 4, 3)), sampler=sampler, group=3))
    for name in ("completion_ids", "candidate_ids"):
        assert torch.equal(getattr(traces[0], name), getattr(traces[1], name))
    close(traces[1].delta, traces[0].delta)


@pytest.mark.parametrize("stops", [(NEWLINE, WORDS.index("a\n")), ()])
def test_a_row_ends_with_its_first_stop_and_the_mask_comes_from_lengths(stops):
    torch.manual_seed(6)
    sampler = Sampler(max_new_tokens=8, stop_ids=stops)
    trace = sample(tiny.model(), [[NEWLINE, 4, NEWLINE], [NEWLINE]], sampler=sampler, group=40)
    assert trace.prompt_mask.sum(1).tolist() == [3] * 40 + [1] * 40
    for ids, mask in zip(trace.completion_ids.tolist(), trace.completion_mask.tolist(), strict=True):
        ends = [t + 1 for t, token in enumerate(ids) if token in stops]
        assert mask == [t < (ends[0] if ends else 8) for t in range(len(ids))]
    lengths = trace.completion_mask.sum(1)
    assert lengths.max() == trace.completion_ids.shape[1]
    assert len(set(lengths.tolist())) > 3 if stops else (lengths == 8).all()
    for blank in (trace.leak, trace.spread, trace.candidate_probs.sum(-1), trace.delta.abs().sum(-1)):
        assert (blank[~trace.completion_mask] == 0).all()


@pytest.mark.parametrize("string", ["\n", "ab", "bcb"])
def test_a_stop_string_ends_a_row_where_the_completion_first_holds_it(string):
    torch.manual_seed(7)
    tokenizer = tiny.tokenizer()
    sampler = Sampler(max_new_tokens=12, stop=stop_at(tokenizer, [string]), temperature=2.0)
    trace = sample(tiny.model(), [[0, 1, NEWLINE, NEWLINE], [12], [0]], sampler=sampler, group=150)
    ended = 0
    for ids, mask in zip(trace.completion_ids.tolist(), trace.completion_mask.tolist(), strict=True):
        texts = ["".join(WORDS[i] for i in ids[: t + 1]) for t in range(sum(mask))]
        assert not any(string in text for text in texts[:-1])
        assert string in texts[-1] or len(texts) == 12
        ended += string in texts[-1]
    assert ended > 2


def test_stop_strings_do_not_depend_on_padding():
    """A one-token prompt that is part of the stop string must not be completed by what stands left of it."""
    stop, tokenizer = [NEWLINE, NEWLINE, NEWLINE], tiny.tokenizer()
    assert stop_at(tokenizer, []) is None

    def only_newlines(_, scores):
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([NEWLINE]), 0.0)

    sampler = Sampler(max_new_tokens=5, stop=stop_at(tokenizer, ["\n\n\n"]), processors=[only_newlines])
    trace = sample(tiny.model(), [[NEWLINE], [1, 2, 3, 4]], sampler=sampler)
    assert trace.completion_mask.sum(1).tolist() == [3, 3]
    assert trace.completion_ids.tolist() == [stop, stop]


def test_a_repetition_penalty_sees_no_padding():
    torch.manual_seed(8)
    net, sampler = tiny.model(), Sampler(max_new_tokens=1, repetition_penalty=3.0, stop_ids=(9,), keep=VOCABULARY)
    apart = sample(net, [[4]], sampler=sampler)
    batch = sample(net, [[4], [1, 2, 3, 5]], sampler=sampler)
    close(batch.candidate_probs[0], apart.candidate_probs[0])


def test_equal_prompts_are_one_group_wherever_they_stand():
    torch.manual_seed(9)
    trace = sample(tiny.model(), [[4, 2], [1], [4, 2]], sampler=Sampler(max_new_tokens=2), group=2)
    assert trace.group.tolist() == [0, 0, 1, 1, 0, 0]
    assert [r[m].tolist() for r, m in zip(trace.prompt_ids, trace.prompt_mask, strict=True)][::2] == [
        [4, 2],
        [1],
        [4, 2],
    ]


def test_one_seed_gives_one_trace_and_modes_stay():
    net = tiny.model(attention_dropout=0.5).train()
    net.lm_head.eval()
    modes = [m.training for m in net.modules()]
    traces = []
    for record in (True, False):
        torch.manual_seed(10)
        traces.append(sample(net, [[1, 2]], sampler=Sampler(max_new_tokens=4), group=3, record=record))
    assert torch.equal(traces[0].completion_ids, traces[1].completion_ids)
    assert torch.equal(traces[0].candidate_probs, traces[1].candidate_probs)
    assert traces[1].delta is None and traces[0].delta is not None
    assert traces[1].spread is None and traces[0].spread is not None
    assert modes == [m.training for m in net.modules()]


@pytest.mark.parametrize("prompts", [[], [[1], []], [[]]])
def test_prompts_without_tokens_are_refused(prompts):
    with pytest.raises(ValueError, match="prompts, . of them without a token"):
        sample(tiny.model(), prompts, sampler=Sampler(max_new_tokens=1))


@pytest.mark.parametrize("settings", [{"max_new_tokens": 0}, {"max_new_tokens": 2, "temperature": 0.0}])
def test_settings_without_a_distribution_are_refused(settings):
    with pytest.raises(ValueError, match="must be at least 1 and temperature=.* above 0"):
        Sampler(**settings)


def test_prompts_are_padded_on_the_left_by_length():
    ids, mask = pad_prompts([[7, 7], [7, 1, 7, 2]], 7)
    assert ids.tolist() == [[7, 7, 7, 7], [7, 1, 7, 2]]
    assert mask.tolist() == [[False, False, True, True], [True] * 4]


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_model_that_cannot_share_a_prompt_draws_the_same(kind):
    net, traces = tiny.model(kind), []
    for stateful in (False, True):
        net._is_stateful = stateful
        torch.manual_seed(11)
        traces.append(sample(net, tiny.prompts((3, 6)), sampler=Sampler(max_new_tokens=5, stop_ids=(2,)), group=3))
    shared, apart = traces
    assert torch.equal(shared.completion_ids, apart.completion_ids)
    close(apart.delta, shared.delta)
    assert torch.equal(shared.group, apart.group)


@pytest.mark.parametrize("keep", [1, 5])
def test_a_position_takes_the_bytes_that_are_stated(keep):
    trace = sample(tiny.model(), tiny.prompts((2,)), sampler=Sampler(max_new_tokens=4, keep=keep), group=3)
    stored = [
        trace.completion_ids, trace.completion_mask, trace.logprob, trace.leak, trace.spread, trace.delta,
        trace.candidate_ids, trace.candidate_probs,
    ]  # fmt: skip
    bytes_each = sum(t.element_size() * t.numel() for t in stored) / trace.completion_ids.numel()
    assert bytes_each == 12 * keep + 4 * HIDDEN + 21


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), 0.0])
def test_a_policy_that_diverged_is_said_to_have(broken):
    mu = torch.full((2, 300), 1 / 300)
    mu[1] = broken
    with pytest.raises(ValueError, match="diverged"):
        draw(mu, uniform(2))
