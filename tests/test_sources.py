"""Where bases come from: singular vectors, random ones, forks; kept ones are the same, and are not collected again."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from forklora.recipes.demo import load_model
from forklora.recipes.options import Arm
from forklora.recipes.sources import arm_bases, completed, singular_vectors, strongest
from peft import LoraConfig

from forklora.backward import layer_shape
from forklora.bases import Bases, LayerBasis
from forklora.targets import target_layers
from ranks import together
from tiny_policy import LAYERS, eager, gpt2, llama, orthonormal, recipe_of


def matrix(shape, values, *, seed=0):
    """A matrix with these singular values, and its true singular vectors, largest first."""
    u, v = (orthonormal(size, len(values), seed=seed + i).double() for i, size in enumerate(shape))
    u, v = torch.linalg.qr(u).Q, torch.linalg.qr(v).Q
    return u @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ v.T, u, v


def aligned(found, expected, tolerance=1e-5):
    """The columns are these up to a sign each."""
    assert found.shape == expected.shape
    overlap = (found.double() * expected.double()).sum(0).abs()
    assert (overlap - 1).abs().max() < tolerance, overlap


@pytest.mark.parametrize("shape", [(12, 12), (20, 9), (9, 20)], ids=["square", "tall", "wide"])
@pytest.mark.parametrize("smallest", [False, True])
@pytest.mark.parametrize("count", [1, 4, 9])
def test_singular_vectors_are_those_of_the_full_decomposition(shape, smallest, count):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    u, values, vt = torch.linalg.svd(weight.double(), full_matrices=False)
    order = torch.arange(len(values)).flip(0) if smallest else torch.arange(len(values))
    left, right = singular_vectors(weight, count=count, smallest=smallest)
    aligned(left, u[:, order[:count]])
    aligned(right, vt.T[:, order[:count]])
    # and the pairs belong together, with positive values
    assert torch.allclose((left.T @ weight @ right).diagonal().double(), values[order[:count]], atol=1e-5)


@pytest.mark.parametrize("shape", [(12, 12), (20, 12), (12, 20)], ids=["square", "tall", "wide"])
def test_a_weight_of_low_rank_has_smallest_vectors_that_it_maps_to_nothing(shape):
    weight, u, v = matrix(shape, [3.0, 2.0, 1.0])
    for count in (10, 12):
        left, right = singular_vectors(weight, count=count, smallest=True)
        for side, true in ((left, u), (right, v)):
            assert torch.allclose(side.T @ side, torch.eye(count), atol=1e-5)
            assert (side[:, :9].double().T @ true).abs().max() < 1e-5
            aligned(side[:, 9:], true.flip(1)[:, : count - 9])
    left, right = singular_vectors(weight, count=5)
    aligned(left[:, :3], u)
    aligned(right[:, :3], v)
    assert torch.allclose(left.T @ left, torch.eye(5), atol=1e-5)


def test_a_weight_of_zeros_still_has_orthonormal_vectors():
    for side in singular_vectors(torch.zeros(7, 5), count=5, smallest=True):
        assert torch.allclose(side.T @ side, torch.eye(5), atol=1e-6)


def loaded(recipe):
    return load_model(recipe.model.name, "float32")


def found(recipe, **settings):
    """Bases of an arm with these settings, on the recipe's model."""
    model, tokenizer = loaded(recipe)
    arm = Arm(name="one", rate=0.1, **({"adapter": "block", "rank": 2, "width": 3} | settings))
    return arm_bases(recipe, arm, model=model, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    policy = eager(llama(tied=False))
    with torch.no_grad():  # sure of some tokens, and not of others
        policy.lm_head.weight.mul_(6)
    return recipe_of(tmp_path_factory.mktemp("sources"), policy=policy, group=4)


def test_an_adapter_without_bases_has_none(recipe):
    assert found(recipe, adapter="lora", width=None) is None


def test_random_bases_are_orthonormal_and_differ_by_seed_and_layer(recipe):
    first, again = (found(recipe, basis="random").bases for _ in range(2))
    other = found(recipe.model_copy(update={"seed": 9}), basis="random").bases
    seen = []
    for name in first:
        for part in ("output", "input"):
            columns = getattr(first[name], part)
            assert torch.allclose(columns.T @ columns, torch.eye(columns.shape[1]), atol=1e-5)
            assert torch.equal(columns, getattr(again[name], part))
            assert not torch.allclose(columns, getattr(other[name], part), atol=1e-2)
            seen.append(columns)
    alike = [(a, b) for a, b in itertools.combinations(seen, 2) if a.shape == b.shape]
    assert alike and not any(torch.allclose(a, b, atol=1e-2) for a, b in alike)


@pytest.mark.parametrize("basis", ["singular", "minor"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_bases_of_the_weights_are_their_singular_vectors_in_the_layout_of_the_layer(basis, kind, tmp_path):
    policy = eager(llama(tied=False)) if kind == "llama" else gpt2()
    recipe = recipe_of(tmp_path, policy=policy)
    bases, modules = found(recipe, basis=basis).bases, dict(loaded(recipe)[0].named_modules())
    for name in bases:
        weight = modules[name].weight.detach()
        weight = weight if kind == "llama" else weight.T
        assert tuple(weight.shape) == layer_shape(modules[name])
        u, _, vt = torch.linalg.svd(weight.double(), full_matrices=False)
        u, v = (u.flip(1), vt.T.flip(1)) if basis == "minor" else (u, vt.T)
        aligned(bases[name].output, u[:, :3], tolerance=1e-3)
        aligned(bases[name].input, v[:, :2], tolerance=1e-3)


@pytest.mark.parametrize(
    "settings", [{}, {"basis": "random"}, {"basis": "singular"}], ids=["forks", "random", "singular"]
)
def test_kept_bases_are_the_fresh_ones_bit_for_bit_and_are_not_collected_again(settings, recipe, tmp_path):
    keeping = recipe.model_copy(update={"forks": recipe.forks.model_copy(update={"kept_in": str(tmp_path)})})
    fresh, first = found(recipe, **settings), found(keeping, **settings)
    (file,) = tmp_path.iterdir()
    before = file.stat().st_mtime_ns, file.read_bytes()
    second = found(keeping, **settings)
    wider = found(keeping, **(settings | {"rank": 5, "width": 6}))  # another arm, the same bases
    assert list(tmp_path.iterdir()) == [file]
    assert (file.stat().st_mtime_ns, file.read_bytes()) == before
    for other in (first, second):
        assert set(other.bases) == set(fresh.bases)
        assert other.rollouts == fresh.rollouts == (0 if settings else 16)
        for name in fresh.bases:
            assert torch.equal(other.bases[name].output, fresh.bases[name].output)
            assert torch.equal(other.bases[name].input, fresh.bases[name].input)
    assert second.seconds == first.seconds == wider.seconds == float(Bases.load(file).facts["seconds"]) > 0
    assert all(torch.equal(wider.bases[n].input[:, :2], fresh.bases[n].input) for n in fresh.bases)


def test_bases_of_other_facts_are_kept_apart(recipe, tmp_path):
    def keeping(**changes):
        forks = recipe.forks.model_copy(update={"kept_in": str(tmp_path), **changes})
        return recipe.model_copy(update={"forks": forks})

    def count():
        return len(list(tmp_path.iterdir()))

    found(keeping())
    found(keeping().model_copy(update={"steps": 99, "seed": 5}))
    assert count() == 1  # neither of them changes what the forks are
    found(keeping(seed=1))
    found(keeping(signal="confident"))
    found(keeping().model_copy(update={"group": 2}))
    assert count() == 4
    found(keeping(), rank=20, width=20)  # takes more than 16 directions
    assert count() == 5


def test_another_model_under_the_same_name_does_not_get_kept_bases(tmp_path):
    recipe = recipe_of(tmp_path)
    recipe = recipe.model_copy(update={"forks": recipe.forks.model_copy(update={"kept_in": str(tmp_path / "kept")})})
    first = found(recipe)
    eager(llama(tied=False, seed=4)).save_pretrained(recipe.model.name)
    second = found(recipe)
    name = next(iter(first.bases))
    assert not torch.allclose(first.bases[name].output, second.bases[name].output, atol=1e-2)


def test_controls_and_forks_of_an_arm_have_bases_of_their_own(recipe):
    signals = ["forks", "shuffled", "confident"]
    several = [found(recipe, forks={"prompts": 4, "signal": signal}).bases for signal in signals]
    for one, two in itertools.combinations(several, 2):
        name = next(iter(one))
        assert not torch.allclose(one[name].output, two[name].output, atol=1e-2)


def random_layers(count, *, seed=0):
    """Bases with random eigenvalues and traces."""
    generator = torch.Generator().manual_seed(seed)
    layers = {}
    for i in range(count):
        s, eta = (torch.rand(3, generator=generator).sort(descending=True).values.double() for _ in "so")
        trace = float(s.sum() + torch.rand(1, generator=generator))
        wide = max(trace, float(eta.sum()))
        layers[f"l{i}"] = LayerBasis(torch.eye(6)[:, :3], s, torch.eye(6)[:, :3], eta, wide, wide)
    return Bases(layers)


@pytest.mark.parametrize("size", [(2, 2), (0, 1), (3, 0)])
@pytest.mark.parametrize("count", [1, 3])
def test_the_strongest_layers_hold_more_than_any_others(size, count):
    bases = random_layers(6, seed=3)
    names = list(bases)

    def energy(name):
        basis = bases[name]
        rows = 1.0 if size[0] == 0 else float(basis.output_values[: size[0]].sum()) / basis.output_trace
        columns = 1.0 if size[1] == 0 else float(basis.input_values[: size[1]].sum()) / basis.input_trace
        return basis.output_trace * rows * columns

    best = max(itertools.combinations(names, count), key=lambda chosen: sum(map(energy, chosen)))
    chosen = strongest(bases, names, count=count, size=size)
    assert set(chosen) == set(best)
    assert chosen == [name for name in names if name in chosen]
    with pytest.raises(ValueError, match="layers=7, and only 6 layers"):
        strongest(bases, names, count=7, size=size)


def test_an_arm_of_few_layers_gets_bases_for_these_alone(recipe):
    every, few = found(recipe), found(recipe, layers=3)
    assert len(every.bases) == LAYERS and len(few.bases) == 3
    assert set(few.bases) <= set(target_layers(loaded(recipe)[0], LoraConfig(target_modules="all-linear")))
    assert json.dumps(few.bases.facts["rollouts"]) == json.dumps(every.bases.facts["rollouts"])


@pytest.mark.parametrize("basis", ["random", "singular"])
def test_forks_say_which_layers_whatever_the_directions(basis, recipe):
    few, forked, every = found(recipe, layers=3, basis=basis), found(recipe, layers=3), found(recipe, basis=basis)
    assert list(few.bases) == list(forked.bases)
    assert (few.rollouts, every.rollouts) == (forked.rollouts, 0)
    assert few.rollouts > 0
    for name in few.bases:
        assert torch.equal(few.bases[name].output, every.bases[name].output)


@pytest.mark.parametrize("have", [0, 2, 6])
@pytest.mark.parametrize("wanted", [1, 4, 8])
def test_completed_bases_keep_what_there_is_and_are_orthonormal(have, wanted):
    values = torch.arange(have, 0, -1).double()
    basis = LayerBasis(orthonormal(8, have), values, orthonormal(9, have, seed=1), values, 9.0, 9.0)
    full = completed(basis, (wanted, wanted), key="k")
    for side, given in ((full.output, basis.output), (full.input, basis.input)):
        kept = min(have, wanted)
        assert torch.equal(side[:, :kept], given[:, :kept])
        assert side.shape[1] == wanted
        assert torch.allclose(side.T @ side, torch.eye(wanted), atol=1e-5)
    assert full.output_values.tolist() == full.input_values.tolist() == [*values.tolist(), *[0.0] * 8][:wanted]
    again, other = completed(basis, (wanted, wanted), key="k"), completed(basis, (wanted, wanted), key="other")
    assert torch.equal(full.output, again.output)
    if wanted - have > 0 and wanted < 8:
        assert not torch.allclose(full.output, other.output, atol=1e-2)
    assert completed(basis, (0, 3), key="k").output.shape == (8, 1)


def keep_together(folder):
    """What a rank gets, whose folder of models is not that of the other: it would look for another file."""
    from torch import distributed

    recipe = recipe_of(Path(folder) / str(distributed.get_rank()))
    kept = Path(folder) / "kept"
    recipe = recipe.model_copy(update={"forks": recipe.forks.model_copy(update={"kept_in": str(kept)})})
    first = found(recipe)
    files = [file.name for file in kept.iterdir()]
    again = found(recipe)
    name = next(iter(first.bases))
    same = torch.equal(first.bases[name].output, again.bases[name].output)
    return {
        "files": files, "same": same, "sum": first.bases[name].output.double().sum().item(),
        "seconds": [first.seconds, again.seconds], "rollouts": first.rollouts,
    }  # fmt: skip


@pytest.mark.slow
def test_ranks_agree_about_kept_bases_and_the_first_one_writes_them(tmp_path):
    pytest.importorskip("deepspeed")
    for place in "01":
        (tmp_path / place).mkdir()
        recipe_of(tmp_path / place)
    first, second = together(keep_together, folder=str(tmp_path))
    assert first == second
    assert len(first["files"]) == 1 and first["same"] and first["rollouts"] == 16
    assert first["seconds"][0] == first["seconds"][1]
