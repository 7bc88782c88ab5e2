"""What a trained policy has become: against enumeration, dense distributions and the model itself."""

import itertools
import json

import pytest
import torch
from forklora.recipes import outcome as room
from forklora.recipes.evaluate import Examiner
from forklora.recipes.options import OutcomeSpec, TaskSpec
from forklora.recipes.outcome import kl_to_base, outcome, pass_at, text_loss
from peft import LoraConfig, get_peft_model

from forklora.rollouts import Sampler
from ranks import together
from tiny_policy import eager, fingerprints, gpt2, llama, recipe_of, shake, tokenizer

PROMPTS = [[20, 21, 22], [30, 31], [40, 41, 42, 43], [20, 21, 22]]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    """No figures of the base from another test."""
    monkeypatch.setattr(room, "_of_base", {})


def lora(model, **options):
    chosen = {"r": 1, "lora_alpha": 1, "target_modules": "all-linear"} | options
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return get_peft_model(model, LoraConfig(**chosen))


def sampler(**changes):
    return Sampler(**({"max_new_tokens": 6, "stop_ids": (1,)} | changes))


@pytest.mark.parametrize("n", [1, 3, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_pass(n):
    rewards = torch.rand(6, n, generator=torch.Generator().manual_seed(n)).round(decimals=1).double()
    rewards[0], rewards[1] = 1.0, 0.0
    rewards[2:, 0] = 1.0
    rewards[3, -1] = 0.999  # nearly is no pass
    found = pass_at(rewards)
    assert list(found) == [k for k in (1, 2, 4, 8) if k <= n]
    for k, share in found.items():
        passed = [any(r == 1 for r in some) for row in rewards.tolist() for some in itertools.combinations(row, k)]
        assert share == pytest.approx(sum(passed) / len(passed))


def test_pass_at_k_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no completion"):
        pass_at(torch.zeros(0, 4))


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6, "top_k": 5}, {"temperature": 1.7, "top_p": 0.8}])
def test_the_divergence_is_the_dense_one(settings, monkeypatch):
    traces, real = [], room.sample

    def seen(*args, **options):
        traces.append(real(*args, **options))
        return traces[-1]

    monkeypatch.setattr(room, "sample", seen)
    monkeypatch.setattr(room, "_TOKENS", 7)
    policy, base = eager(llama(tied=False)), llama(seed=1)
    found = kl_to_base(policy, base, prompts=PROMPTS, sampler=sampler(**settings), samples=3)
    (trace,), terms = traces, []
    for i in range(len(trace)):
        prompt, drawn = trace.prompt_ids[i][trace.prompt_mask[i]], trace.completion_ids[i][trace.completion_mask[i]]
        with torch.no_grad():
            both = [model(torch.cat([prompt, drawn])[None]).logits[0, len(prompt) - 1 : -1] for model in (policy, base)]
        p, b = ((z.double() / settings.get("temperature", 1.0)).softmax(-1) for z in both)
        terms += (p * (p / b).log()).sum(-1).tolist()
    assert len(terms) == int(trace.completion_mask.sum()) < 4 * 3 * 6  # some have ended early
    assert found == pytest.approx(sum(terms) / len(terms), rel=1e-5)


def test_the_divergence_does_not_depend_on_what_is_drawn_together(monkeypatch):
    policy, base = eager(llama(tied=False)), llama(seed=1)
    asked = {"prompts": PROMPTS, "sampler": sampler(), "samples": 2}
    whole = kl_to_base(policy, base, **asked)
    monkeypatch.setattr(room, "_BATCH", 3)
    assert kl_to_base(policy, base, **asked) == pytest.approx(whole, rel=1e-6)


def test_nothing_lies_between_a_model_and_itself_or_its_fresh_adapter():
    asked = {"prompts": PROMPTS, "sampler": sampler(temperature=0.9), "samples": 2}
    assert kl_to_base(llama(), llama(), **asked) == 0
    fresh = lora(llama())
    assert kl_to_base(fresh, llama(), **asked) == 0
    assert text_loss(fresh, tokenizer()) == text_loss(llama(), tokenizer())
    assert kl_to_base(shake(fresh), llama(), **asked) > 1e-3


@pytest.mark.parametrize("make", [llama, gpt2])
def test_the_loss_on_text_is_the_models_own(make, monkeypatch):
    monkeypatch.setattr(room, "_TOKENS", 50)
    model, longest = make(), {llama: 256, gpt2: 128}[make]
    documents = [d for d in room._TEXT.read_text().split("\n\n") if d.strip()]
    assert 6 <= len(documents) <= 8 and 900 <= sum(len(d.split()) for d in documents) <= 1200
    total, count = 0.0, 0
    for document in documents:
        ids = tokenizer()(document.strip(), return_tensors="pt")["input_ids"]
        for piece in ids.split(longest, dim=1):
            n = piece.shape[1] - 1
            if n:
                total += n * float(model(piece, labels=piece).loss.detach())
                count += n
    assert text_loss(model, tokenizer()) == pytest.approx(total / count, rel=1e-5)


def asked(folder, **changes):
    spec = {"samples": 4, "kl_prompts": 2, "untrained": {"name": "addition", "options": {"shots": 1}}}
    return recipe_of(folder, outcome=spec | changes, arms=[{"name": "plain", "adapter": "lora", "rate": 0.1}])


def measured(recipe, model, base):
    examiner = Examiner(recipe, recipe.task.build(), tokenizer=tokenizer())
    return outcome(recipe, model, base=base, tokenizer=tokenizer(), examiner=examiner)


def policies():
    return shake(lora(eager(llama(tied=False))), size=0.1), eager(llama(tied=False))


def test_an_outcome_says_all_there_is_and_moves_nothing(tmp_path):
    recipe, (policy, base) = asked(tmp_path), policies()
    policy.train()
    policy.base_model.model.model.layers[0].eval()
    modes = [m.training for m in policy.modules()]
    weights = [{n: p.clone() for n, p in model.named_parameters()} for model in (policy, base)]
    needs, hashes, state = [p.requires_grad for p in policy.parameters()], fingerprints(policy), torch.get_rng_state()
    found = measured(recipe, policy, base)
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in policy.modules()] == modes
    assert [p.requires_grad for p in policy.parameters()] == needs
    assert fingerprints(policy) == hashes
    assert policy.active_adapters == ["default"]
    for model, before in zip((policy, base), weights, strict=True):
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert list(found) == [
        "prompts", "samples", "accuracy", "pass_at", "kl_to_base", "text_loss_base", "text_loss", "untrained_task",
        "untrained_base", "untrained", "update",
    ]  # fmt: skip
    assert (found["prompts"], found["samples"], found["untrained_task"]) == (3, 4, "addition")
    assert list(found["pass_at"]) == ["1", "2", "4"]
    assert found["pass_at"]["1"] == pytest.approx(found["accuracy"])
    assert found["kl_to_base"] > 0
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert measured(recipe, policy, base) == found


def test_the_untrained_task_is_asked_its_own_way(tmp_path, monkeypatch):
    recipe, (policy, base) = asked(tmp_path), policies()
    other = TaskSpec(name="addition", options={"shots": 1})
    plain = recipe_of(tmp_path, task=other.model_dump(), sampling={"max_new_tokens": 4, "stop": ["\n"]})
    lengths, real = [], Examiner.rewards

    def counting(examiner, trace, **options):
        lengths.append(trace.completion_ids.shape[1])
        real(examiner, trace, **options)
        return [len(set(row)) / 7 for row in trace.completion_ids.tolist()]

    monkeypatch.setattr(Examiner, "rewards", counting)
    asker = Examiner(plain, other.build(), tokenizer=tokenizer())
    expected = [asker.accuracy(model) for model in (base, policy)]
    lengths.clear()
    found = measured(recipe, policy, base)
    assert [found["untrained_base"], found["untrained"]] == expected
    assert lengths == [5, 4, 4]  # the recipe's length, then that of the other task


def test_the_base_is_asked_once_for_all_runs_of_a_process(tmp_path):
    recipe, (policy, base) = asked(tmp_path), policies()
    first = measured(recipe, policy, base)
    again = measured(recipe, policy, llama(seed=7, tied=False))
    assert again["text_loss_base"] == first["text_loss_base"]
    room._of_base.clear()
    assert measured(recipe, policy, llama(seed=7, tied=False))["text_loss_base"] != first["text_loss_base"]


def test_without_an_untrained_task_its_figures_are_null(tmp_path):
    recipe = asked(tmp_path, untrained=None)
    found = measured(recipe, *policies())
    assert [found[name] for name in ("untrained_task", "untrained_base", "untrained")] == [None] * 3


def test_a_figure_that_is_not_finite_is_null(tmp_path, monkeypatch):
    policy, base = policies()
    recipe = asked(tmp_path, untrained=None)
    base.lm_head.weight.data[5] = torch.inf
    found = measured(recipe, policy, base)
    assert found["kl_to_base"] is None and found["text_loss_base"] is None
    assert found["text_loss"] > 0


def of_a_rank(folder):
    """Seen by one of several ranks; what is drawn must be seen, so a reward counts different tokens."""
    from pathlib import Path

    recipe = recipe_of(Path(folder), outcome={"samples": 3, "kl_prompts": 3}, evaluation={"prompts": 5, "samples": 2})
    policy, base = policies()
    examiner = Examiner(recipe, recipe.task.build(), tokenizer=tokenizer())
    object.__setattr__(examiner.task, "score", lambda text, _: len(set(text)) / 7)
    kl = kl_to_base(policy, base, prompts=examiner.prompts[:3], sampler=examiner.sampler, samples=2)
    return {"table": examiner.table(policy, samples=3).tolist(), "kl": kl}


def test_ranks_share_the_work_and_find_the_same(tmp_path):
    alone = of_a_rank(str(tmp_path))
    assert len({x for row in alone["table"] for x in row}) > 2
    for found in together(of_a_rank, folder=str(tmp_path)):
        assert found["table"] == alone["table"]
        assert found["kl"] == pytest.approx(alone["kl"], rel=1e-5)


def test_defaults_count_where_a_recipe_has_none(tmp_path):
    found = measured(recipe_of(tmp_path), *policies())
    assert found["samples"] == OutcomeSpec().samples
