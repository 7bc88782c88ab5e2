"""Shares of the policy gradient's energy inside reward-free bases: between nothing and all, and above chance."""

import pytest
import torch
from forklora.recipes import capture
from forklora.recipes.capture import held_out_gradients, principal_inputs, run_capture
from forklora.recipes.demo import load_model
from forklora.recipes.evaluate import Examiner

from tiny_policy import LAYERS, eager, llama, recipe_of

MORE = {
    "prompts": 4, "group": 4, "forks": {"prompts": 16, "seed": 0},
    "evaluation": {"every": 1, "prompts": 12, "samples": 1},
}  # fmt: skip


SIZE = 48


def square():
    """A policy all of whose layers have the same two sizes, and enough directions everywhere."""
    return eager(llama(tied=False, width=SIZE, heads=4))


def pays_for_length(_, trace, *, first, samples):
    """A reward that a policy which knows nothing gets in different amounts: few tokens."""
    assert len(trace) % samples == first % samples == 0
    return (-trace.completion_mask.sum(1).float()).tolist()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Examiner, "rewards", pays_for_length)
        return run_capture(recipe_of(tmp_path_factory.mktemp("capture"), policy=square(), **MORE))


def test_every_layer_type_has_a_row_and_every_figure_is_a_share(found):
    titles = [row["layers"] for row in found["rows"]]
    kinds = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert titles == [*kinds, "all layers", "all layers, random bases", "last writer: model.layers.1.mlp.down_proj"]
    for row in found["rows"]:
        assert set(row) == {"layers", *capture._NAMES}
        assert all(0 <= row[name] <= 1 + 1e-6 for name in capture._NAMES)
    assert len(found["layers"]) == LAYERS
    assert all(entry["energy"] > 0 for entry in found["layers"])
    assert sum(row["share"] for row in found["energy"]) == pytest.approx(1)


def test_more_directions_hold_more_and_a_block_holds_least(found):
    for entry in (found for layer in found["layers"] for found in layer["shares"].values()):
        for side in ("out k={}", "in k={}", "block {0}x{0}"):
            shares = [entry[side.format(k)] for k in (1, 4, 16) if entry[side.format(k)] is not None]
            assert shares == sorted(shares)
        for k in (1, 4, 16):
            if (block := entry[f"block {k}x{k}"]) is not None:
                assert block <= min(entry[f"out k={k}"], entry[f"in k={k}"]) + 1e-6


def test_no_basis_holds_more_than_the_gradients_own(found):
    for layer in found["layers"]:
        own = layer["shares"]["the gradient's own"]
        for shares in layer["shares"].values():
            assert all(share is None or share <= own[name] + 1e-4 for name, share in shares.items())


def test_every_basis_has_the_sides_it_can_have(found):
    rows = {row["basis"]: row for row in found["bases"]}
    assert [*rows] == [
        "carried span", "span itself", "principal inputs", "largest singular vectors of the weight", "random",
        "the gradient's own",
    ]  # fmt: skip
    assert rows["span itself"]["in k=4"] is None and rows["span itself"]["out k=4"] > 0
    assert rows["principal inputs"]["out k=4"] is None and rows["principal inputs"]["in k=4"] > 4 / SIZE
    assert rows["carried span"]["in k=16"] > rows["random"]["in k=16"] + 0.1


def test_the_inputs_are_those_of_the_policys_own_rollouts(tmp_path):
    recipe = recipe_of(tmp_path, policy=square(), **MORE)
    model, tokenizer = load_model(recipe.model.name, "float32")
    examiner = Examiner(recipe, recipe.task.build(), tokenizer=tokenizer)
    state = torch.get_rng_state()
    found = principal_inputs(recipe, model, prompts=examiner.prompts, examiner=examiner)
    assert torch.equal(torch.get_rng_state(), state) and len(found) == LAYERS
    layers = model.model.layers
    assert torch.equal(found["model.layers.0.self_attn.q_proj"], found["model.layers.0.self_attn.k_proj"])
    seen = []
    handle = layers[0].self_attn.q_proj.register_forward_hook(lambda _, args, __: seen.append(args[0].flatten(0, -2)))
    with torch.no_grad():
        for prompt in examiner.prompts:
            model(torch.tensor([prompt]))
    handle.remove()
    x, basis = torch.cat(seen), found["model.layers.0.self_attn.q_proj"][:, :4]
    best = torch.linalg.svd(x, full_matrices=False).S[:4].square().sum()
    assert (x @ basis).square().sum() > 0.9 * best  # the prompts are most of what is read


def test_random_bases_hold_their_share_of_dimensions_and_ours_more(found):
    rows = {row["layers"]: row for row in found["rows"]}
    chance, ours = rows["all layers, random bases"], rows["all layers"]
    for side in ("out", "in"):
        for k in (4, 16):
            assert chance[f"{side} k={k}"] == pytest.approx(k / SIZE, rel=0.4)
        assert 0 < chance[f"{side} k=1"] < 3 / SIZE
        assert ours[f"{side} k=4"] > 1.5 * chance[f"{side} k=4"]
    assert ours["block 4x4"] > 3 * chance["block 4x4"]


def test_the_row_of_a_type_is_the_mean_of_its_layers(found):
    row = next(r for r in found["rows"] if r["layers"] == "o_proj")
    mine = [e["shares"]["carried span"]["out k=4"] for e in found["layers"] if e["layer"].endswith("o_proj")]
    assert row["out k=4"] == pytest.approx(sum(mine) / 2)


def test_the_span_itself_is_told_for_the_layers_that_write_into_the_stream(found):
    told = {
        e["layer"].rpartition(".")[2] for e in found["layers"] if e["shares"]["span itself"]["out k=16"] is not None
    }
    assert told == {"o_proj", "down_proj"}


def test_measuring_leaves_model_and_random_state_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(Examiner, "rewards", pays_for_length)
    recipe = recipe_of(tmp_path, policy=square(), **MORE)
    model, tokenizer = load_model(recipe.model.name, "float32")
    before = {n: p.clone() for n, p in model.named_parameters()}
    state = torch.get_rng_state()
    examiner = Examiner(recipe, recipe.task.build(), tokenizer=tokenizer)
    gradients, identity = held_out_gradients(recipe, model, examiner=examiner)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None and p.requires_grad and torch.equal(before[n], p) for n, p in model.named_parameters())
    assert len(gradients) == LAYERS
    assert all(u.shape == (SIZE, 16) for u in identity.values())
    again, _ = held_out_gradients(recipe, model, examiner=examiner)
    assert all(torch.equal(gradients[n], again[n]) for n in gradients)
