"""EVA and LoRA-GA start from what the data say: principal directions of inputs, and the first gradient."""

import pytest
import torch
from forklora.recipes.data_starts import started
from forklora.recipes.demo import load_model
from forklora.recipes.learner import learner_of
from forklora.recipes.options import Arm
from forklora.recipes.peft_arms import adapter_config
from peft import get_peft_model

from forklora.bases import drawn, encode
from forklora.rollouts import Sampler, sample, stop_at
from forklora.targets import target_layers
from ranks import together
from test_arm_ranks import guessing
from tiny_policy import LAYERS, deltas, llama, recipe_of, tokenizer

TASK = {"name": "multiplication", "options": {"low": 0, "high": 2, "shots": 1}}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("starts")
    forks = {"prompts": 12, "seed": 0}
    return recipe_of(folder, policy=guessing(llama(tied=False)), task=TASK, group=8, forks=forks)


def right(recipe):
    """The task's own reward."""
    task = recipe.task.build()
    return lambda completions, answer: [task.score(c, a) for c, a in zip(completions, answer, strict=True)]


def ready(recipe, init, *, reward=None, rank=2, model=None):
    arm = Arm(name=init, adapter="lora", init=init, rank=rank, rate=0.1)
    model = load_model(recipe.model.name, "float32")[0] if model is None else model
    config = adapter_config(arm)
    settings = {"tokenizer": tokenizer(), "reward": reward or right(recipe)}
    return started(recipe, arm, model=model, config=config, **settings)


def questions(recipe):
    return recipe.task.build().examples(recipe.forks.prompts, seed=recipe.seed, split="train")


def inputs_of(model, prompts):
    """Inputs of every target layer at every token, each prompt run alone and without padding."""
    modules, seen = dict(model.named_modules()), {}
    handles = [
        modules[name].register_forward_hook(lambda _, args, __, n=name: seen.setdefault(n, []).append(args[0][0]))
        for name in target_layers(model, adapter_config(Arm(name="a", adapter="lora", rate=1.0)))
    ]
    with torch.no_grad():
        for ids in prompts:
            model(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts).double() for name, parts in seen.items()}


def test_other_adapters_see_no_data(recipe):
    model = load_model(recipe.model.name, "float32")[0]
    found = ready(recipe, "pissa", model=model)
    assert found.model is model and found.config.init_lora_weights == "pissa" and found.rollouts == 0


def test_eva_spans_the_principal_directions_of_each_layer_s_inputs(recipe):
    base = load_model(recipe.model.name, "float32")[0]
    seen = inputs_of(base, [encode(tokenizer(), q.prompt) for q in questions(recipe)])
    found = ready(recipe, "eva")
    assert found.config is None and found.rollouts == 0
    factors = {
        name.removeprefix("base_model.model."): module.lora_A["default"].weight.detach().double()
        for name, module in found.model.named_modules()
        if hasattr(module, "lora_A")
    }
    assert sum(len(a) for a in factors.values()) == 2 * LAYERS
    for name, a in factors.items():
        x = seen[name] - seen[name].mean(0)
        covariance = x.T @ x
        best = torch.linalg.eigvalsh(covariance).flip(0)[: len(a)].sum()
        assert torch.allclose(a @ a.T, torch.eye(len(a)).double(), atol=1e-4)
        assert (a @ covariance @ a.T).trace() > 0.95 * best, name
    plain = get_peft_model(base, adapter_config(Arm(name="a", adapter="lora", rank=2, rate=1.0)))
    shares = []
    for name, module in plain.named_modules():
        if hasattr(module, "lora_A") and (short := name.removeprefix("base_model.model.")) in factors:
            a = torch.linalg.qr(module.lora_A["default"].weight.detach().double().T).Q.T
            x = seen[short] - seen[short].mean(0)
            shares.append(float((x @ a.T).square().sum() / x.square().sum()))
    assert sum(shares) / len(shares) < 0.5  # chance would not have passed


def first_gradient(recipe):
    """``dloss/dW`` of every target layer, by autograd on the full distribution: nothing of the package's own pass."""
    model = load_model(recipe.model.name, "float32")[0]
    asked, given = recipe.sampling, questions(recipe)
    stop = stop_at(tokenizer(), asked.stop)
    sampler = Sampler(max_new_tokens=asked.max_new_tokens, stop_ids=(tokenizer().eos_token_id,), stop=stop)
    total = torch.zeros(())
    for place, question in enumerate(given):
        luck, _ = drawn([place], group=recipe.group, length=asked.max_new_tokens, seed=recipe.seed)
        prompt = encode(tokenizer(), question.prompt)
        trace = sample(model, [prompt], sampler=sampler, group=recipe.group, luck=luck)
        drawn_ids = [ids[mask].tolist() for ids, mask in zip(trace.completion_ids, trace.completion_mask, strict=True)]
        texts = [tokenizer().decode(ids, skip_special_tokens=True) for ids in drawn_ids]
        rewards = torch.tensor(right(recipe)(texts, [question.answer] * recipe.group))
        for ids, advantage in zip(drawn_ids, rewards - rewards.mean(), strict=True):
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            chosen = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])
            total = total - advantage * chosen.sum()
    total = total / (len(given) * recipe.group * asked.max_new_tokens)
    modules = dict(model.named_modules())
    names = target_layers(model, adapter_config(Arm(name="a", adapter="lora", rate=1.0)))
    found = torch.autograd.grad(total, [modules[name].weight for name in names])
    return dict(zip(names, found, strict=True))


def test_lora_ga_gets_the_gradient_of_the_policy_s_own_rollouts(recipe):
    expected, found = first_gradient(recipe), ready(recipe, "lora_ga")
    assert found.rollouts == 12 * 8
    modules = dict(found.model.named_modules())
    assert set(found.config.target_modules) == set(expected)
    for name, gradient in expected.items():
        assert gradient.any()
        given = modules[name]._peft_loraga_grad
        assert (given - gradient).abs().max() < 1e-4 * gradient.abs().max(), name
    assert all(p.grad is None for p in found.model.parameters())


def test_the_first_update_of_lora_ga_holds_more_of_that_gradient_than_a_plain_one(recipe):
    gradients = first_gradient(recipe)

    def held(model):
        """Share of the gradient that one step of gradient descent on both factors moves along."""
        shares = []
        for name, module in model.named_modules():
            if not hasattr(module, "lora_A"):
                continue
            a, b = (getattr(module, f"lora_{part}")["default"].weight.detach() for part in "AB")
            g = gradients[name.removeprefix("base_model.model.")]
            step = (g @ a.T) @ a + b @ (b.T @ g)
            shares.append(float((step * g).sum() / step.norm() / g.norm()))
        return sum(shares) / len(shares)

    found = ready(recipe, "lora_ga")
    torch.manual_seed(0)
    informed = get_peft_model(found.model, found.config)
    plain = get_peft_model(
        load_model(recipe.model.name, "float32")[0], adapter_config(Arm(name="a", adapter="lora", rank=2, rate=1.0))
    )
    assert held(informed) > 0.8 > 0.5 > held(plain)
    assert any(delta.any() for delta in deltas(informed).values())
    assert not any(delta.any() for delta in deltas(plain).values())


def test_rewards_that_never_differ_leave_lora_ga_without_a_gradient(recipe):
    with pytest.raises(ValueError, match="no reward differs within a group"):
        ready(recipe, "lora_ga", reward=lambda completions, answer: [1.0] * len(completions))


def test_eva_refuses_what_it_would_look_for_for_ever(recipe):
    few = recipe.model_copy(update={"forks": recipe.forks.model_copy(update={"prompts": 1})})
    with pytest.raises(ValueError, match="rank 16 takes 32 tokens"):
        ready(few, "eva", rank=16)


def test_a_start_counts_its_seconds_and_rollouts(recipe, tmp_path):
    def learner(init):
        arm = Arm(name=init, adapter="lora", init=init, rank=2, rate=0.1)
        return learner_of(recipe.model_copy(update={"arms": (arm,)}), folder=tmp_path / init)

    eva, informed = learner("eva"), learner("lora_ga")
    assert (eva.init_rollouts, informed.init_rollouts) == (0, 96)
    assert informed.rollouts(1) == 96 + 16
    assert min(eva.init_seconds, informed.init_seconds) > 0


def share(folder):
    """Gradient and factors that a rank gets."""
    from pathlib import Path

    recipe = recipe_of(Path(folder), task=TASK, group=8, forks={"prompts": 12, "seed": 0})
    informed, eva = ready(recipe, "lora_ga"), ready(recipe, "eva")
    name = "model.layers.1.mlp.up_proj"
    gradient = dict(informed.model.named_modules())[name]._peft_loraga_grad
    factors = {n: p.double().sum().item() for n, p in eva.model.named_parameters() if "lora_A" in n}
    return {"gradient": gradient.flatten().tolist(), "factors": factors, "rollouts": informed.rollouts}


@pytest.mark.slow
def test_ranks_share_the_rollouts_and_have_the_same_start(recipe, tmp_path):
    pytest.importorskip("deepspeed")
    made = recipe_of(tmp_path, policy=guessing(llama(tied=False)), task=TASK, group=8, forks={"prompts": 12, "seed": 0})
    first, second = together(share, folder=str(tmp_path))
    assert first == second and first["rollouts"] == 96
    alone = ready(made, "lora_ga")
    expected = dict(alone.model.named_modules())["model.layers.1.mlp.up_proj"]._peft_loraga_grad
    found = torch.tensor(first["gradient"]).view_as(expected)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
