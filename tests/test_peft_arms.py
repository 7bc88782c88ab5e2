"""Every kind of arm through the real trainer: it begins as the base, trains the numbers it states, keeps the base."""

import re

import pytest
import torch
from forklora.recipes.demo import load_model
from forklora.recipes.learner import learner_of
from forklora.recipes.options import FORK_KINDS, Arm
from forklora.recipes.peft_arms import adapted_layers, adapter_config, keeps_base, lay_out, unfreeze, weights_dtype
from forklora.recipes.provenance import hash_tensors

from forklora.backward import layer_shape
from test_arm_ranks import guessing
from tiny_policy import LAYERS, fingerprints, gpt2, llama, logits, recipe_of

QUARTER = {"adapter": "tinylora", "rank": 2, "width": 5, "tying": 0.75}
ARMS = {
    **{kind: {"adapter": kind, "rank": 2} for kind in FORK_KINDS},
    **{f"{kind}-trained": {"adapter": kind, "rank": 2, "train_basis": True} for kind in FORK_KINDS},
    "core-wide": {"adapter": "core", "rank": 2, "width": 5},
    "block-wide": {"adapter": "block", "rank": 2, "width": 5},
    "rlpo": {"adapter": "inputs", "rank": 2, "basis": "singular"},
    "rlmo": {"adapter": "inputs", "rank": 2, "basis": "minor"},
    "random": {"adapter": "block", "rank": 2, "basis": "random"},
    "few": {"adapter": "span", "rank": 2, "layers": 3},
    "shuffled": {"adapter": "span", "rank": 2, "forks": {"prompts": 4, "signal": "shuffled"}},
    "elsewhere": {"adapter": "span", "rank": 2, "forks": {"prompts": 4, "task": {"name": "addition"}}},
    "lora": {"adapter": "lora", "rank": 2},
    "alpha": {"adapter": "lora", "rank": 2, "alpha": 8.0},
    "chosen": {"adapter": "lora", "rank": 2, "targets": ["q_proj", "v_proj"]},
    **{
        init: {"adapter": "lora", "rank": 2, "init": init}
        for init in ("gaussian", "pissa", "olora", "orthogonal", "mica", "eva", "lora_ga")
    },
    "tinylora": {"adapter": "tinylora", "rank": 2, "width": 3},
    "tied": QUARTER,
    "full": {"adapter": "full", "optimizer": "sgd"},
    "adamw": {"adapter": "lora", "optimizer": "adamw", "centering": "none", "top_entropy": 0.5},
    "value": {"adapter": "lora", "optimizer": "adamw", "centering": "value"},
    "uneven": {"adapter": "lora", "evenly": False, "schedule": "linear"},
    "kl": {"adapter": "inputs", "rank": 2, "optimizer": "kl"},
    "braked": {"adapter": "lora", "rank": 2, "brake": 0.01, "rate": 10.0},
    "coins": {"adapter": "lora", "reward": "random", "schedule": "cosine"},
    "offline": {"adapter": "lora", "base_prompts": 2},
}
# Largest difference of logits at the start where factors are not zero, float32: rounding of W - s B A + s B A.
ROUNDED = {"pissa": 2e-5, "olora": 2e-5, "orthogonal": 2e-5, "lora_ga": 2e-5}
MOVES = {"pissa", "olora", "lora_ga", "full"}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe whose policy guesses right sometimes, so that there is a gradient at the start."""
    folder = tmp_path_factory.mktemp("arms")
    task = {"name": "multiplication", "options": {"low": 0, "high": 2, "shots": 1}}
    return recipe_of(folder, policy=guessing(llama(tied=False)), task=task, group=8)


def arm_of(name, **changes):
    return Arm(name=name, **({"rate": 0.01} | ARMS[name] | changes))


def shapes(recipe):
    model, _ = load_model(recipe.model.name, "float32")
    modules = dict(model.named_modules())
    return {name: layer_shape(modules[name]) for name in adapted_layers(model, Arm(name="a", adapter="lora", rate=1.0))}


def numbers(name, sizes):
    """What an arm trains, by formula: of layers ``[o, i]`` at rank 2."""
    arm, r = arm_of(name), ARMS[name].get("rank", 1)
    width = arm.width or (16 if name.startswith("core") else r)
    if name == "few":
        return None  # which layers is for the bases to say
    if name == "tied":
        return width * max(1, round(len(sizes) * 0.25))
    if name == "chosen":
        sizes = {layer: size for layer, size in sizes.items() if layer.endswith(("q_proj", "v_proj"))}
    each = {
        "span": lambda o, i: r * i, "core": lambda o, i: r * (width + i), "inputs": lambda o, i: r * o,
        "block": lambda o, i: r * width, "tinylora": lambda o, i: width, "full": lambda o, i: o * i,
        "lora": lambda o, i: r * i if name == "mica" else r * (o + i),
    }  # fmt: skip
    return sum(each[arm.adapter](*size) for size in sizes.values())


def test_the_table_holds_every_adapter_start_and_option():
    said = [arm_of(name) for name in ARMS]
    for option in ("adapter", "init", "basis", "optimizer", "schedule", "centering", "reward"):
        allowed = set(Arm.model_fields[option].annotation.__args__)
        assert {getattr(arm, option) for arm in said} == allowed, option
    assert {name for name in ARMS if not keeps_base(arm_of(name))} == MOVES


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_begins_as_the_base_trains_what_it_states_and_keeps_what_it_promises(name, recipe, tmp_path):
    arm = arm_of(name)
    base, _ = load_model(recipe.model.name, "float32")
    learner = learner_of(recipe.model_copy(update={"arms": (arm,)}), folder=tmp_path)
    model = learner.trainer.model.eval()
    start, expected = logits(model), logits(base)
    if name in ROUNDED:
        assert not torch.equal(start, expected)
        assert (start - expected).abs().max() < ROUNDED[name] * expected.abs().max()
    else:
        assert torch.equal(start, expected)
    assert all(p.is_contiguous() and p.stride(-1) == 1 for p in model.parameters())  # DeepSpeed sends no others round
    asked = {n: p for n, p in model.named_parameters() if p.requires_grad}
    trained, stated = sum(p.numel() for p in asked.values()), numbers(name, shapes(recipe))
    if name not in ("few", "eva") and not name.endswith("-trained"):
        assert trained == stated
    if name == "few":
        assert len(asked) == 3
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    learner.trainer.train()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved and moved <= set(asked)
    assert (hash_tensors(model) == learner.base_hash) == (name not in MOVES)
    assert learner.keeps_base == (name not in MOVES)
    assert not torch.equal(logits(model.eval()), start)


def test_eva_spreads_its_budget_of_ranks_and_never_exceeds_it(recipe, tmp_path):
    learner = learner_of(recipe.model_copy(update={"arms": (arm_of("eva"),)}), folder=tmp_path)
    ranks = [p.shape[0] for n, p in learner.trainer.model.named_parameters() if "lora_A" in n]
    assert sum(ranks) == 2 * LAYERS and max(ranks) <= 4
    assert all(p.dtype == torch.float32 for p in learner.trainer.model.parameters() if p.requires_grad)


def test_full_training_trains_the_target_layers_in_float32_and_nothing_else(recipe):
    arm = arm_of("full", targets=["q_proj"])
    model, _ = load_model(recipe.model.name, "float32")
    unfreeze(model, arm)
    asked = [n for n, p in model.named_parameters() if p.requires_grad]
    assert len(asked) == 2 and all(re.search(r"q_proj\.weight$", n) for n in asked)
    narrow = recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": "bfloat16"})})
    assert weights_dtype(narrow, arm) == "float32"
    assert weights_dtype(narrow, arm_of("lora")) == "bfloat16"
    assert adapter_config(arm) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", "pissa", "mica", "rlpo", "block", "eva", "lora_ga"])
def test_an_arm_trains_on_narrow_weights_too(name, recipe, tmp_path):
    narrow = recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": "bfloat16"})})
    learner = learner_of(narrow.model_copy(update={"arms": (arm_of(name),)}), folder=tmp_path)
    assert {p.dtype for p in learner.trainer.model.parameters() if p.requires_grad} == {torch.float32}
    learner.trainer.train()
    assert learner.trainer.state.global_step == 2


def test_the_scale_is_alpha_over_rank_and_one_without_alpha():
    assert adapter_config(arm_of("alpha")).lora_alpha == 8.0
    assert adapter_config(arm_of("lora")).lora_alpha == 2
    assert adapter_config(arm_of("span")).lora_alpha == 2


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_unfreezing_leaves_the_head_alone(kind):
    model = llama() if kind == "llama" else gpt2()
    before = fingerprints(model)
    unfreeze(model, arm_of("full"))
    asked = {n for n, p in model.named_parameters() if p.requires_grad}
    assert len(asked) == (LAYERS if kind == "llama" else 8)
    assert not any("lm_head" in n or "embed" in n or "wte" in n for n in asked)
    assert fingerprints(model) == before


def test_parameters_are_laid_out_row_by_row_single_columns_too():
    layer = torch.nn.Module()
    for name, values in (("wide", torch.arange(6.0).view(3, 2).T), ("column", torch.arange(4.0).view(1, 4).T)):
        layer.register_parameter(name, torch.nn.Parameter(values))
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    lay_out(layer)
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter, before[name]) and parameter.stride(-1) == 1
        parameter.data.view(torch.uint8)
