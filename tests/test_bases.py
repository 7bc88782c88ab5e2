"""Laws of the bases: they are eigenvectors of the dense sums, depend on their seed only and leave no mark."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tiny
from forklora.backward import linear_layers, residual_signal, residual_writers
from forklora.bases import Bases, BasisConfig, LayerBasis, collect_bases, drawn, encode, identity_span, seeded
from forklora.rollouts import Sampler, sample
from test_backward import dense_sums, row_by_row
from tiny import HIDDEN, close

SAMPLER = Sampler(max_new_tokens=4, stop_ids=(2, 7))
CONFIG = BasisConfig(output=3, input=3, group=4, batch=3, progress=False, seed=5)
PROMPTS = [*tiny.prompts((3, 5, 1, 4)), "abc\n", "j"]


def collect(net, config=CONFIG, **changes):
    settings = {"prompts": PROMPTS, "sampler": SAMPLER} | changes
    change, sampler = changes.get("change"), settings["sampler"]
    return collect_bases(net, tiny.tokenizer(), settings["prompts"], config=config, sampler=sampler, change=change)


def equal(a, b):
    assert list(a) == list(b) and a.facts == b.facts and torch.equal(a.spectrum, b.spectrum)
    for name in a:
        for part in ("output", "output_values", "input", "input_values"):
            one, other = getattr(a[name], part), getattr(b[name], part)
            assert one.dtype == other.dtype and torch.equal(one, other)
        assert (a[name].output_trace, a[name].input_trace) == (b[name].output_trace, b[name].input_trace)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_bases_are_the_eigenvectors_of_the_dense_sums(kind):
    net, tokenizer = tiny.model(kind), tiny.tokenizer()
    config = BasisConfig(output=3, input=2, group=3, batch=6, progress=False, seed=5)
    bases = collect(net, config)
    luck, advantages = drawn(range(6), group=3, length=4, seed=5)
    trace = sample(net, [encode(tokenizer, p) for p in PROMPTS], sampler=SAMPLER, group=3, luck=luck)
    rows = row_by_row(net, trace, advantages=advantages, layers=linear_layers(net))
    assert sorted(bases) == sorted(linear_layers(net))
    for name, basis in bases.items():
        sums = dense_sums(trace, rows[name])
        sides = (
            (basis.output, basis.output_values, basis.output_trace),
            (basis.input, basis.input_values, basis.input_trace),
        )
        for (vectors, values, energy), matrix in zip(sides, sums, strict=True):
            k = vectors.shape[1]
            close(vectors.T @ vectors, torch.eye(k))
            close(values, torch.linalg.eigvalsh(matrix).flip(0)[:k], 1e-3)
            close(matrix @ vectors.double(), vectors.double() * values, 1e-3)
            assert abs(energy / matrix.trace() - 1) < 1e-4
    delta = trace.delta[trace.completion_mask].double()
    close(bases.spectrum, torch.linalg.eigvalsh(delta.T @ delta / len(delta)).flip(0).clamp_min(0), 1e-4)


def marks(net):
    numpy_state = np.random.get_state()
    states = torch.get_rng_state().tolist(), numpy_state[1].tolist(), numpy_state[2]
    hooks = [
        (dict(m._forward_hooks), dict(m._forward_pre_hooks), m.training, "forward" in m.__dict__) for m in net.modules()
    ]
    return states, hooks, [p.requires_grad for p in net.parameters()], [p.grad is None for p in net.parameters()]


@pytest.mark.parametrize("fails_at", [None, 1, 2, 5])
def test_collecting_leaves_no_mark_on_errors_too(fails_at):
    net, calls = tiny.model(attention_dropout=0.3).train(), []
    net.model.layers[0].eval()
    net.model.layers[0].mlp.requires_grad_(False)

    def fail(*_):
        calls.append(1)
        if len(calls) == fails_at:
            raise RuntimeError("no memory left")

    net.model.layers[1].register_forward_hook(fail)
    weights, before = [p.detach().clone() for p in net.parameters()], marks(net)
    try:
        collect(net)
    except RuntimeError:
        assert fails_at
    assert bool(fails_at) == (len(calls) == fails_at)
    assert marks(net) == before
    assert all(torch.equal(p, w) for p, w in zip(net.parameters(), weights, strict=True))


def test_python_s_random_state_stays():
    """In a process of its own: here the checker of shapes draws from it."""
    script = """
import random, tiny
from forklora.bases import BasisConfig, collect_bases
from forklora.rollouts import Sampler
before, config = random.getstate(), BasisConfig(output=2, input=2, progress=False)
collect_bases(tiny.model(), tiny.tokenizer(), ["abc", "d"], config=config, sampler=Sampler(max_new_tokens=3))
assert random.getstate() == before, "the state of random has moved"
"""
    folder = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_seed_alone_decides():
    net, found = tiny.model(), []
    for state in (1, 2):
        torch.manual_seed(state)
        found.append(collect(net))
    equal(*found)
    other = collect(net, BasisConfig(output=3, input=3, group=4, batch=3, progress=False, seed=6))
    assert not torch.equal(other.spectrum, found[0].spectrum)


def test_the_size_of_a_batch_does_not_matter():
    one, other = (
        collect(tiny.model(), BasisConfig(output=3, input=3, group=4, batch=b, progress=False)) for b in (1, 8)
    )
    assert one.facts == other.facts
    for name, basis in one.items():
        close(basis.output_values, other[name].output_values, 1e-4)
        close(basis.input @ basis.input.T, other[name].input @ other[name].input.T, 1e-3)


def test_numbers_of_a_prompt_depend_on_its_place_and_the_seed_only():
    luck, advantages = drawn([4, 9, 2], group=3, length=5, seed=1)
    alone, one = drawn([9], group=3, length=5, seed=1)
    assert torch.equal(luck(3)[3:6], alone(3)) and torch.equal(advantages[3:6], one)
    assert len({float(x) for t in range(5) for x in luck(t)}) == 45
    assert not torch.equal(drawn([9], group=3, length=5, seed=2)[0](3), alone(3))
    close(advantages.view(3, 3).sum(1) + 1, torch.ones(3))


def test_saved_bases_come_back_bit_for_bit(tmp_path):
    bases = collect(tiny.model())
    bases.save(tmp_path / "deep" / "bases.safetensors")
    loaded = Bases.load(tmp_path / "deep" / "bases.safetensors")
    assert sorted(loaded) == sorted(bases)
    equal(Bases({name: bases[name] for name in loaded}, bases.facts, bases.spectrum), loaded)
    assert bases.facts["rollouts"] == "24" and bases.facts["seed"] == "5" and int(bases.facts["forks"]) > 0


def test_bases_without_a_spectrum_are_saved_too(tmp_path):
    vectors = torch.eye(4)[:, :2]
    basis = LayerBasis(vectors, torch.ones(2).double(), vectors, torch.ones(2).double(), 1 / 3, 2e30)
    Bases({"spectrum": basis, "a:b": basis}).save(tmp_path / "b")
    loaded = Bases.load(tmp_path / "b")
    assert loaded.spectrum is None and sorted(loaded) == ["a:b", "spectrum"]
    assert torch.equal(loaded["a:b"].input, vectors)
    assert (loaded["spectrum"].output_trace, loaded["spectrum"].input_trace) == (1 / 3, 2e30)


def test_without_forks_there_is_no_basis():
    with pytest.raises(ValueError, match="no forks: at every position the sampler was sure"):
        collect(tiny.model(), sampler=Sampler(max_new_tokens=3, top_k=1))


def test_too_few_directions_are_told_by_layer():
    config = BasisConfig(output=12, input=12, group=2, batch=1, progress=False)
    with pytest.raises(
        ValueError, match=r"layer model\.layers\.\d.*asked for 1?\d directions, but only \d+ carry energy"
    ):
        collect(tiny.model(), config, prompts=[[3]], sampler=Sampler(max_new_tokens=2))


def test_with_fewer_those_that_carry_energy_are_kept():
    few = {"prompts": [[3]], "sampler": Sampler(max_new_tokens=2)}
    config = BasisConfig(output=12, input=12, group=2, batch=1, progress=False, fewer=True)
    bases = collect(tiny.model(), config, **few)
    widths = [side.shape[1] for basis in bases.values() for side in (basis.output, basis.input)]
    assert 1 <= min(widths) < 12
    for name, basis in bases.items():
        settings = {"output": basis.output.shape[1], "input": basis.input.shape[1], "layers": (name,)}
        exact = collect(tiny.model(), replace(config, fewer=False, width=48, **settings), **few)[name]
        assert torch.equal(exact.output, basis.output) and torch.equal(exact.input, basis.input)


def test_another_signal_gives_other_bases_of_the_same_rollouts():
    def doubled(trace, head):
        assert head.width == HIDDEN
        return replace(trace, delta=2 * trace.delta)

    plain, changed = collect(tiny.model()), collect(tiny.model(), change=doubled)
    assert plain.facts == changed.facts
    for name in plain:
        close(changed[name].output_values, 4 * plain[name].output_values)
        assert changed[name].output_trace == pytest.approx(4 * plain[name].output_trace)


def test_only_the_chosen_layers_get_bases_and_narrow_sides_are_whole():
    name = "model.layers.1.self_attn.v_proj"
    config = BasisConfig(output=12, input=3, group=4, batch=6, progress=False, layers=(name,))
    bases = collect(tiny.model(), config)
    assert list(bases) == [name] and len(bases) == 1
    assert bases[name].output.shape == (8, 8) and bases[name].input.shape == (HIDDEN, 3)
    with pytest.raises(ValueError, match="no layers named v_proj"):
        collect(tiny.model(), BasisConfig(layers=("v_proj",), progress=False))


@pytest.mark.parametrize("wrong", [{"output": 0}, {"input": 0}, {"batch": 0}, {"group": 1}])
def test_settings_without_a_basis_are_refused(wrong):
    with pytest.raises(ValueError, match="must be at least 1"):
        BasisConfig(**wrong)


def test_the_identity_span_is_the_leading_part_of_the_signal_past_the_norm():
    net = tiny.model()
    torch.manual_seed(0)
    traces = [sample(net, tiny.prompts((3, 4), seed=s), sampler=SAMPLER, group=4) for s in range(2)]
    span = identity_span(net, traces, output=3)
    assert list(span) == residual_writers(net, HIDDEN)
    signal = torch.cat([residual_signal(net, t) for t in traces]).double()
    best = torch.linalg.svd(signal, full_matrices=False).Vh[:3]
    for basis in span.values():
        close(basis.double() @ basis.double().T, best.T @ best, 1e-4)


def test_prompts_may_be_text_messages_or_tokens():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}j{% endif %}"
    )
    assert encode(tokenizer, "abc\n") == [0, 1, 2, 10]
    assert encode(tokenizer, [{"role": "user", "content": "ab"}]) == [0, 1, 9]
    assert encode(tokenizer, torch.tensor([3, 4])) == encode(tokenizer, (3, 4)) == [3, 4]


def test_seeded_draws_are_the_same_and_the_state_comes_back():
    before, draws = torch.get_rng_state(), []
    for _ in range(2):
        with pytest.raises(KeyError), seeded(3):
            draws.append(torch.rand(4))
            raise KeyError
    assert torch.equal(*draws) and torch.equal(before, torch.get_rng_state())
