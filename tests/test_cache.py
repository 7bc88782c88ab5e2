"""Laws of the cache: a row continues its own prompt whatever else is in the batch, and the model is left alone."""

import warnings

import pytest
import torch

import tiny
from forklora import forward
from forklora.attention import CannotShare
from forklora.cache import SharedLayer, can_share, shared_cache, sharing
from forklora.forward import Calls
from forklora.rollouts import Sampler, sample
from forklora.unembed import read_unembedding
from tiny import KINDS, VOCABULARY, close

SHARING = [kind for kind in KINDS if can_share(tiny.model(kind))]


def test_a_layer_returns_what_it_was_given_in_order_while_its_memory_grows():
    layer, generator = SharedLayer(), torch.Generator().manual_seed(0)
    prompts = torch.randn(2, 3, 4, 5, generator=generator)
    layer.update(prompts, prompts + 1)
    layer.batch_select_indices(torch.tensor([1, 0, 1]))
    assert layer.get_seq_length() == 4
    parts = [torch.randn(3, 3, 1, 5, generator=generator) for _ in range(70)]
    for t, part in enumerate(parts):
        keys, values = layer.update(part, part - 1)
        assert torch.equal(keys, torch.cat(parts[: t + 1], 2)) and torch.equal(values, keys - 1)
        assert layer.get_seq_length() == 5 + t and layer.get_mask_sizes(1) == (6 + t, 0)
    layer.batch_select_indices(torch.tensor([2, 0]))
    keys, _ = layer.update(parts[0][:2], parts[0][:2])
    assert torch.equal(keys, torch.cat([torch.cat(parts, 2)[[2, 0]], parts[0][:2]], 2))
    assert layer.group.tolist() == [1, 1]


@pytest.mark.parametrize("kind", SHARING)
def test_rows_that_leave_and_rows_that_stay_have_the_logits_of_each_alone(kind):
    net = tiny.model(kind)
    prompts, rows = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([0, 1, 1, 0, 1])
    follow = torch.tensor([[7, 8, 9], [1, 1, 2], [3, 3, 4], [9, 8, 7], [5, 0, 5]])
    with torch.no_grad(), sharing(net):
        cache = shared_cache(net)
        net(input_ids=prompts, past_key_values=cache, attention_mask=torch.ones_like(prompts))
        cache.batch_select_indices(rows)
        net(input_ids=follow[:, :1], past_key_values=cache, attention_mask=torch.ones(5, 4))
        kept = torch.tensor([4, 0, 2])
        cache.batch_select_indices(kept)
        for t in (1, 2):
            ids, mask = follow[kept, t : t + 1], torch.ones(3, 4 + t)
            found = net(
                input_ids=ids, past_key_values=cache, attention_mask=mask, position_ids=torch.full((3, 1), 3 + t)
            )
    whole = torch.cat([prompts[rows], follow], 1)[kept]
    close(found.logits[:, -1], net(input_ids=whole).logits[:, -1])


def test_the_model_is_as_it_was_on_errors_too():
    net = tiny.model()
    before = net.config._attn_implementation
    with pytest.raises(ZeroDivisionError), sharing(net):
        assert net.config._attn_implementation != before
        raise ZeroDivisionError
    assert net.config._attn_implementation == before == "sdpa"


def test_a_model_whose_attention_refuses_runs_with_copies_and_says_so_once(monkeypatch):
    net, seen = tiny.model(), []
    assert Calls.of(net).shares_memory

    def refuse(module, *args, **kwargs):
        seen.append(module)
        raise CannotShare("its attention has a sink")

    from transformers import AttentionInterface

    monkeypatch.setattr("forklora.cache.shared_attention", refuse)
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="prompts are copied for their groups: its attention has a sink"):
        copied = sample(net, tiny.prompts((3, 5)), sampler=Sampler(max_new_tokens=4), group=3)
    assert len(seen) == 1 and not Calls.of(net).shares_memory
    monkeypatch.undo()
    AttentionInterface.register("forklora_shared", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        sample(net, tiny.prompts((3, 5)), sampler=Sampler(max_new_tokens=4), group=3)
    torch.manual_seed(0)
    shared = sample(tiny.model(), tiny.prompts((3, 5)), sampler=Sampler(max_new_tokens=4), group=3)
    assert torch.equal(copied.completion_ids, shared.completion_ids)
    close(copied.delta, shared.delta)


def test_sampling_falls_back_with_the_luck_it_would_have_had(monkeypatch):
    """A refusal after tokens were drawn starts over from the same random state."""
    net, calls = tiny.model(), []
    real = forward.Calls.attending

    def late(self, model):
        calls.append(self.shares_memory)
        return real(self, model)

    from forklora import attention

    whole = attention.shared_attention

    def refuse_later(module, query, key, *rest, **kw):
        if query.shape[2] == 1:
            raise CannotShare("too late")
        return whole(module, query, key, *rest, **kw)

    monkeypatch.setattr(forward.Calls, "attending", late)
    monkeypatch.setattr("forklora.cache.shared_attention", refuse_later)
    torch.manual_seed(3)
    with pytest.warns(UserWarning, match="too late"):
        found = sample(net, [[1, 2]], sampler=Sampler(max_new_tokens=3), group=4)
    assert calls == [True, False]
    monkeypatch.undo()
    torch.manual_seed(3)
    expected = sample(tiny.model(), [[1, 2]], sampler=Sampler(max_new_tokens=3), group=4)
    assert torch.equal(found.completion_ids, expected.completion_ids)


@pytest.mark.parametrize("setting", ["eager", "sdpa"])
def test_only_the_fused_kernel_is_replaced(setting):
    net = tiny.model()
    net.set_attn_implementation(setting)
    assert can_share(net) == (setting == "sdpa")


def test_rows_that_end_early_leave_the_batch(monkeypatch):
    net, sizes = tiny.model(), []
    head = read_unembedding(net)
    net.register_forward_pre_hook(lambda _, __, kw: sizes.append(len(kw["input_ids"])), with_kwargs=True)
    torch.manual_seed(1)
    trace = sample(
        net, tiny.prompts((3, 2)), sampler=Sampler(max_new_tokens=12, stop_ids=(1, 4, 9)), group=20, unembedding=head
    )
    alive = trace.completion_mask.sum(0).tolist()
    assert sizes[0] == 2 and min(sizes[1:]) < 20
    for count, size in zip(alive[1:], sizes[1:], strict=True):
        assert count <= size <= max(4 / 3 * count + 1, count + 1)
    assert trace.completion_ids.max() < VOCABULARY
