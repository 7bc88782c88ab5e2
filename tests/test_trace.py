"""Laws of the trace: what goes in comes out bit for bit, and what is no recorded distribution does not get in."""

import os
from dataclasses import fields, replace

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forklora.archive import load_tensors, save_tensors
from forklora.trace import Trace


@pytest.fixture
def as_users_run_it(monkeypatch):
    """The shapes in signatures are not executed, so that the errors are those a user sees."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def random_trace(seed=0, *, prompts=2, group=2, longest=(3, 4), kept=3, vocabulary=7, size=5):
    """A valid trace: random distributions over a small vocabulary, of which the likeliest tokens are kept."""
    rng = torch.Generator().manual_seed(seed)
    n, (p, t) = prompts * group, longest
    mu = (2 * torch.randn(n, t, vocabulary, generator=rng)).softmax(-1)
    token = torch.multinomial(mu.flatten(0, 1), 1, generator=rng).view(n, t)
    probs, ids = mu.topk(kept)
    length = torch.randint(1, t + 1, (n, 1), generator=rng)
    prompt_length = torch.randint(1, p + 1, (prompts, 1), generator=rng).repeat_interleave(group, 0)
    return Trace(
        prompt_ids=torch.randint(vocabulary, (prompts, p), generator=rng).repeat_interleave(group, 0),
        prompt_mask=torch.arange(p) >= p - prompt_length,
        completion_ids=token,
        completion_mask=torch.arange(t) < length,
        candidate_ids=ids,
        candidate_probs=probs,
        leak=mu.scatter(-1, ids, 0).sum(-1),
        logprob=mu.gather(-1, token[..., None])[..., 0].log(),
        spread=torch.rand(n, t, generator=rng),
        group=torch.arange(prompts).repeat_interleave(group),
        delta=torch.randn(n, t, size, generator=rng).bfloat16(),
        reward=torch.rand(n, generator=rng),
        facts={"temperature": "1.0", "model": "tiny, naïve"},
    )


def bits(trace):
    """Everything a trace holds, comparable with ==."""
    values = {f.name: getattr(trace, f.name) for f in fields(trace)}
    return {
        name: (value.dtype, value.shape, value.contiguous().flatten().view(torch.uint8).tolist())
        if isinstance(value, torch.Tensor)
        else value
        for name, value in values.items()
    }


@pytest.mark.parametrize("optional", [{}, {"delta": None}, {"reward": None}, {"delta": None, "reward": None}])
def test_saved_and_loaded_is_the_same_bit_for_bit(tmp_path, optional):
    trace = replace(random_trace(), **optional)
    trace.save(tmp_path / "new" / "trace.safetensors")
    assert bits(Trace.load(tmp_path / "new" / "trace.safetensors")) == bits(trace)
    assert os.listdir(tmp_path / "new") == ["trace.safetensors"]


def test_views_and_empty_traces_survive_the_file(tmp_path):
    trace = random_trace()
    shared = replace(trace, spread=trace.leak, prompt_mask=torch.ones(1, dtype=torch.bool).expand(4, 3)[:, :3])
    for one in (replace(shared, prompt_ids=trace.prompt_ids.T.contiguous().T), trace.select([])):
        one.save(tmp_path / "trace")
        assert bits(Trace.load(tmp_path / "trace")) == bits(one)


def test_a_file_is_readable_by_whom_the_umask_says(tmp_path):
    random_trace().save(tmp_path / "trace")
    (tmp_path / "plain").touch()
    assert (tmp_path / "trace").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_no_part_of_a_file_passes_for_the_whole(tmp_path):
    path = tmp_path / "trace"
    random_trace(longest=(1, 1)).save(path)
    content = path.read_bytes()
    for end in range(0, len(content), 7):
        path.write_bytes(content[:end])
        with pytest.raises(ValueError, match="cut short"):
            Trace.load(path)


@settings(max_examples=100)
@given(data=st.data())
def test_no_flipped_bit_goes_unnoticed(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "flipped"
    random_trace(longest=(2, 2)).save(path)
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"damaged|unknown|holds"):
        Trace.load(path)


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path, monkeypatch):
    path = tmp_path / "trace"
    random_trace(0).save(path)
    before = path.read_bytes()

    def full_disk(_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        random_trace(1).save(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["trace"]


def test_where_nothing_can_be_written_the_error_comes_from_the_system(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "trace", tmp_path / "folder"):
        with pytest.raises(OSError):
            random_trace().save(path)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_another_kind_or_another_version_of_file_is_named(tmp_path):
    save_tensors(tmp_path / "bases", {"a": torch.ones(2)}, kind="bases", facts={"seed": "0"})
    assert load_tensors(tmp_path / "bases", kind="bases")[1] == {"seed": "0"}
    with pytest.raises(ValueError, match="holds 'bases', not 'trace'"):
        Trace.load(tmp_path / "bases")
    save_tensors(tmp_path / "old", {"leak": torch.ones(2), "entropy": torch.ones(2)}, kind="trace", facts={})
    with pytest.raises(ValueError, match=r"'candidate_ids'.*'entropy'.*another version"):
        Trace.load(tmp_path / "old")
    with pytest.raises(FileNotFoundError):
        Trace.load(tmp_path / "nowhere")


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("leak", lambda x: x[:, :-1], r"leak has shape \[4, 3\], but must be \[N, T\] with N=4, P=3, T=4"),
        ("group", lambda x: x[:, None], r"group has shape \[4, 1\], but must be \[N\]"),
        ("candidate_probs", lambda x: x[..., :2], r"candidate_probs has shape \[4, 4, 2\].*K=3"),
        ("delta", lambda x: x[1:], r"delta has shape \[3, 4, 5\]"),
        ("prompt_ids", lambda x: x.int(), "prompt_ids is torch.int32, but must be torch.int64"),
        ("logprob", lambda x: x.double(), "logprob is torch.float64, but must be torch.float32"),
        ("delta", lambda x: x.long(), "delta is torch.int64, but must be floating point"),
        ("leak", lambda x: x.to("meta"), "several devices"),
        ("facts", lambda x: {"temperature": 1.0}, "facts must map strings to strings"),
        ("prompt_mask", lambda x: torch.tensor([[True, False, False]] * 4), "left padded"),
        ("group", lambda x: torch.zeros_like(x), "group 0 stands for two prompts"),
        ("reward", lambda x: x / 0, "reward is not finite"),
        ("completion_ids", lambda x: x - 9, "negative id"),
        ("leak", lambda x: x - 1, r"leak is outside 0\.\.1: .* the first in row 0 at position 0"),
        ("leak", lambda x: x * float("nan"), r"leak is outside 0\.\.1"),
        ("candidate_probs", lambda x: x.flip(-1), "descending"),
        ("candidate_ids", lambda x: x * 0 - 1, "unused slot"),
        ("candidate_ids", lambda x: x * 0 + 1, "stands twice"),
        ("candidate_probs", lambda x: x * 0.9, "do not add up"),
        ("candidate_probs", lambda x: x - 1, "negative"),
        ("logprob", lambda x: x / 1.5, "logprob does not fit"),
        ("logprob", lambda x: x * float("nan"), "logprob does not fit"),
        ("spread", lambda x: x - 1, "spread is negative"),
        ("delta", lambda x: x / 0, "delta is not finite"),
    ],
)
def test_what_is_no_recorded_distribution_is_refused(name, change, message):
    trace = random_trace()
    with pytest.raises(ValueError, match=message):
        replace(trace, **{name: change(getattr(trace, name))})


def test_a_token_the_sampler_could_not_draw_is_refused():
    trace = random_trace(kept=7)
    with pytest.raises(ValueError, match="logprob does not fit"):
        replace(trace, candidate_ids=trace.candidate_ids + 7)
    with pytest.raises(ValueError, match="logprob does not fit"):
        replace(trace, logprob=trace.logprob / 1.5)


def test_padding_may_hold_anything():
    trace = random_trace()
    off = ~trace.completion_mask
    assert off.any()
    garbage = {
        "completion_ids": trace.completion_ids.masked_fill(off, -5),
        "candidate_ids": trace.candidate_ids.masked_fill(off[..., None], 3),
        "candidate_probs": trace.candidate_probs.masked_fill(off[..., None], float("nan")),
        "spread": trace.spread.masked_fill(off, -1),
        "prompt_ids": torch.where(trace.prompt_mask, trace.prompt_ids, -torch.arange(4)[:, None]),
    }
    assert len(replace(trace, **garbage)) == 4


@given(seed=st.integers(0, 5), cut=st.integers(1, 3))
@settings(max_examples=10)
def test_the_parts_of_a_trace_make_the_trace(seed, cut):
    trace = random_trace(seed)
    rows = torch.arange(len(trace))
    assert bits(Trace.concat([trace.select(rows[:cut]), trace.select(rows >= cut)])) == bits(trace)


def test_rows_come_in_the_order_asked_for():
    trace = random_trace()
    assert bits(trace.select([3, 0]).select([1, 0])) == bits(trace.select([0, 3]))
    assert trace.select([2, 2]).reward.tolist() == [trace.reward[2].item()] * 2


def test_concatenation_pads_prompts_left_and_the_rest_right():
    small, large = random_trace(0, longest=(2, 3), kept=2), random_trace(1, longest=(5, 6), kept=4)
    both = Trace.concat([small, large])
    assert both.prompt_ids.shape == (8, 5) and both.candidate_ids.shape == (8, 6, 4) and both.delta.shape == (8, 6, 5)
    assert torch.equal(both.prompt_ids[:4, 3:], small.prompt_ids) and not both.prompt_mask[:4, :3].any()
    assert torch.equal(both.logprob[:4, :3], small.logprob) and not both.completion_mask[:4, 3:].any()
    assert torch.equal(both.candidate_ids[:4, :3, :2], small.candidate_ids)
    assert (both.candidate_ids[:4, :, 2:] == -1).all() and (both.candidate_probs[:4, :, 2:] == 0).all()
    assert torch.equal(both.delta[4:], large.delta)


def test_groups_of_different_prompts_stay_apart_when_concatenated():
    first, second = random_trace(0), random_trace(1)
    assert torch.equal(first.group, second.group) and not torch.equal(first.prompt_ids, second.prompt_ids)
    assert Trace.concat([first, second, first]).group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 0, 0, 1, 1]


def test_traces_that_do_not_belong_together_are_refused():
    trace = random_trace()
    others = {
        "no trace": [],
        "differ in facts": [trace, replace(trace, facts={"temperature": "0.5"})],
        "hold delta": [trace, trace.without_delta()],
        "hold reward": [replace(trace, reward=None), trace],
        "5 numbers in one trace and 4": [random_trace(size=4), trace],
    }
    for message, traces in others.items():
        with pytest.raises(ValueError, match=message):
            Trace.concat(traces)


def test_without_delta_drops_only_the_delta():
    trace = random_trace()
    assert bits(trace.without_delta()) == bits(trace) | {"delta": None}
