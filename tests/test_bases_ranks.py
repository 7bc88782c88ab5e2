"""Laws of collecting on several ranks: one basis everywhere, that of all rollouts together; or one error."""

from pathlib import Path

import pytest
import torch

import tiny
from forklora.backward import LayerSums, linear_layers
from forklora.bases import Bases, BasisConfig, collect_bases, drawn, read_bases
from forklora.rollouts import Sampler, sample
from ranks import together
from test_bases import equal
from tiny import HIDDEN, close

pytest.importorskip("deepspeed")

SAMPLER, SURE = Sampler(max_new_tokens=4, stop_ids=(2, 7)), Sampler(max_new_tokens=4, top_k=1)
CONFIG = BasisConfig(output=3, input=3, group=4, batch=2, progress=False, seed=5)
GREEDY = BasisConfig(output=12, input=12, group=2, batch=1, progress=False)
PROMPTS = tiny.prompts((3, 5, 1, 4, 2, 6))
# What each rank is given: its prompts, its sampler, the settings of both.
CASES = {
    "shares": ((PROMPTS[:4], SAMPLER), (PROMPTS[4:], SAMPLER), CONFIG),
    "every other": ((PROMPTS[::2], SAMPLER), (PROMPTS[1::2], SAMPLER), CONFIG),
    "one without prompts": (([], SAMPLER), (PROMPTS, SAMPLER), CONFIG),
    "one without forks": ((PROMPTS, SAMPLER), (PROMPTS[:1], SURE), CONFIG),
    "no forks": ((PROMPTS[:4], SURE), (PROMPTS[4:], SURE), CONFIG),
    "no prompts": (([], SAMPLER), ([], SAMPLER), CONFIG),
    "too few": (([[3]], Sampler(max_new_tokens=2)), ([], SAMPLER), GREEDY),
    "one fails": ((PROMPTS, SAMPLER), ([[3], []], SAMPLER), CONFIG),
    "both fail": (([[]], SAMPLER), ([[3], []], SAMPLER), CONFIG),
}


def wrapped(net):
    """As torch wraps it: every forward pass of the wrapper sends the buffers round."""
    net.register_buffer("mark", torch.zeros(1))
    return torch.nn.parallel.DistributedDataParallel(net)


def collected(folder):
    """Every case, and one more under DDP; which error there was, or the facts, with the bases in a file."""
    rank, found = torch.distributed.get_rank(), {}
    cases = {name: (*case, lambda net: net) for name, case in CASES.items()}
    cases["wrapped"] = (*CASES["one without prompts"], wrapped)
    for name, case in cases.items():
        prompts, sampler = case[rank]
        try:
            bases = collect_bases(case[3](tiny.model()), tiny.tokenizer(), prompts, config=case[2], sampler=sampler)
        except (ValueError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
        else:
            bases.save(Path(folder, f"{name} {rank}"))
            found[name] = bases.facts
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return folder, together(collected, folder=str(folder))


@pytest.mark.parametrize("case", ["shares", "every other", "one without prompts", "one without forks", "wrapped"])
def test_every_rank_has_the_same_basis_bit_for_bit(run, case):
    folder, (first, second) = run
    assert first[case] == second[case]
    equal(*(Bases.load(Path(folder, f"{case} {rank}")) for rank in (0, 1)))


@pytest.mark.parametrize("case", ["shares", "one without prompts", "one without forks"])
def test_it_is_the_basis_of_all_rollouts_together(run, case):
    folder, (facts, _) = run
    net, layers = tiny.model(), linear_layers(tiny.model())
    sums = LayerSums(net, layers, hidden=HIDDEN, width=32, seed=5)
    rows = 0
    for rank, (prompts, sampler) in enumerate(CASES[case][:2]):
        for place, prompt in enumerate(prompts):
            luck, advantages = drawn([rank + 2 * place], group=CONFIG.group, length=4, seed=CONFIG.seed)
            trace = sample(net, [prompt], sampler=sampler, group=CONFIG.group, luck=luck)
            sums.add(net, trace, advantages=advantages)
            rows += len(trace)
    expected, found = read_bases(sums, output=3, input=3, facts={}), Bases.load(Path(folder, f"{case} 0"))
    assert int(facts[case]["rollouts"]) == rows
    assert int(facts[case]["prompts"]) == sum(len(prompts) for prompts, _ in CASES[case][:2])
    close(found.spectrum, expected.spectrum, 1e-5)
    for name in layers:
        close(found[name].output_values, expected[name].output_values, 1e-5)
        close(found[name].input_values, expected[name].input_values, 1e-5)
        assert found[name].output_trace == pytest.approx(expected[name].output_trace, rel=1e-5)
        close(found[name].output @ found[name].output.T, expected[name].output @ expected[name].output.T, 1e-4)
        close(found[name].input @ found[name].input.T, expected[name].input @ expected[name].input.T, 1e-4)


def test_it_does_not_depend_on_the_number_of_ranks(run):
    folder, _ = run
    found = Bases.load(Path(folder, "every other 0"))
    alone = collect_bases(tiny.model(), tiny.tokenizer(), PROMPTS, config=CONFIG, sampler=SAMPLER)
    assert found.facts == alone.facts
    for name in alone:
        close(found[name].output_values, alone[name].output_values, 1e-4)
        close(found[name].output @ found[name].output.T, alone[name].output @ alone[name].output.T, 1e-3)
        close(found[name].input @ found[name].input.T, alone[name].input @ alone[name].input.T, 1e-3)


@pytest.mark.parametrize("case", ["no forks", "no prompts", "too few"])
def test_what_fails_for_all_fails_on_all_with_the_same_words(run, case):
    _, (first, second) = run
    assert first[case] == second[case]
    assert first[case].startswith("ValueError: layer " if case == "too few" else "ValueError: no forks")


def test_a_rank_that_fails_leaves_no_other_waiting(run):
    _, (first, second) = run
    assert second["one fails"].startswith("ValueError: ")
    assert first["one fails"] == "RuntimeError: collecting bases failed on 1 other rank; see the error there."
    assert first["both fail"].startswith("ValueError: ") and second["both fail"].startswith("ValueError: ")
