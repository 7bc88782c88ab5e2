"""What is measured of an update is what was put into it, whatever the files look like."""

import pytest
import torch
from forklora.recipes.measure_plan import MeasurePlan
from forklora.recipes.measuring import measure_update
from forklora.recipes.pairs import WeightPairs
from forklora.recipes.refusal import Refusal
from forklora.recipes.spans import Spans, read_spans
from safetensors.torch import save_file

from forklora.bases import Bases, LayerBasis
from tiny_policy import LAYERS, eager, llama, tokenizer


def orthonormal(size, count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(size, count, dtype=torch.float64, generator=generator)).Q


def saved(folder, tensors):
    folder.mkdir()
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    return str(folder)


def of(before, after, folder, **settings):
    return measure_update(WeightPairs(saved(folder / "a", before), saved(folder / "b", after)), **settings)


NAME = "model.layers.3.mlp.up_proj.weight"


def test_a_known_update_gives_the_known_figures(tmp_path):
    u, v = orthonormal(40, 3, 0), orthonormal(30, 3, 1)
    weight = orthonormal(40, 30, 2) * torch.arange(30, 0, -1)
    delta = u @ torch.diag(torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64)) @ v.T
    found = of(
        {NAME: weight, "norm.weight": torch.ones(4)}, {NAME: weight + delta, "norm.weight": torch.ones(4)}, tmp_path
    )
    (matrix,), (vector,) = found["matrices"], found["vectors"]
    assert matrix["numerical_rank"] == 3 and matrix["exact"] and matrix["error"] == 0
    assert (matrix["norm"], matrix["stable_rank"]) == pytest.approx((21**0.5, 21 / 16))
    assert matrix["top_energy"] == pytest.approx(1)
    assert vector["unchanged_bf16"] == vector["unchanged_relative"] == vector["unchanged_absolute"] == 1
    kind, norms = found["rows"]
    assert (kind["weights"], kind["moved"], kind["full_rank"]) == ("up_proj", 1, pytest.approx(0.1))
    assert (norms["weights"], norms["moved"]) == ("norms and biases", None)


def test_an_update_along_the_weights_own_directions_overlaps_them_and_a_random_one_as_chance_does(tmp_path):
    weight = orthonormal(300, 60, 0) * torch.arange(60, 0, -1) @ orthonormal(60, 60, 1).T
    own = torch.linalg.svd(weight)
    along = 1e-3 * own.U[:, :4] @ own.Vh[:4]
    found = of({NAME: weight}, {NAME: weight + along}, tmp_path, top=4)["matrices"][0]
    assert found["principal_left"]["overlap"] == pytest.approx(1) and found["principal_right"][
        "overlap"
    ] == pytest.approx(1)
    assert found["rotation"]["left_largest"] < 1e-3
    (tmp_path / "second").mkdir()
    overlaps = []
    for seed in range(20):
        noise = 1e-3 * torch.randn(300, 60, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        folder = tmp_path / "second" / str(seed)
        folder.mkdir()
        entry = of({NAME: weight}, {NAME: weight + noise}, folder, top=4)["matrices"][0]
        overlaps.append(entry["principal_left"]["overlap"])
        assert entry["principal_left"]["random"] == pytest.approx(4 / 300)
    mean = torch.tensor(overlaps)
    assert abs(float(mean.mean()) - 4 / 300) < 3 * float(mean.std()) / 20**0.5 + 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_figures_do_not_depend_on_the_type_of_storage_but_for_its_rounding(tmp_path, dtype):
    weight, delta = orthonormal(64, 48, 0), 0.5 * orthonormal(64, 3, 1) @ orthonormal(48, 3, 2).T
    after = weight + delta
    found = of({NAME: weight.to(dtype)}, {NAME: after.to(dtype)}, tmp_path)["matrices"][0]
    rounding = torch.finfo(dtype).eps
    assert found["norm"] == pytest.approx(0.5 * 3**0.5, rel=10 * rounding)
    assert found["stable_rank"] == pytest.approx(3, rel=20 * rounding)
    # rounding alone moves weights by a few thousandths of themselves in bfloat16, and fills the rank
    assert found["numerical_rank"] == 3 if dtype != torch.bfloat16 else found["numerical_rank"] > 3


def test_nothing_moved_is_said_and_not_made_up(tmp_path):
    weight = {NAME: torch.randn(8, 6), "b": torch.randn(8)}
    found = of(weight, weight, tmp_path)
    (matrix,) = found["matrices"]
    assert (matrix["norm"], matrix["numerical_rank"], matrix["stable_rank"], matrix["top_energy"]) == (0, 0, None, None)
    assert matrix["principal_left"] is None and matrix["rotation"] is None
    row = found["rows"][0]
    assert (row["moved"], row["norm"], row["stable_rank"], row["unchanged_bf16"]) == (0, 0, None, 1)


def spans_of(u, q, layer):
    return Spans(
        Bases({layer: LayerBasis(u, torch.ones(u.shape[1]), q, torch.ones(q.shape[1]), 1.0, 1.0)}), {}, frozenset()
    )


def test_the_share_inside_a_span_is_what_was_put_there(tmp_path):
    u, q = orthonormal(40, 8, 0).float(), orthonormal(30, 8, 1).float()
    weight, layer = orthonormal(40, 30, 5), NAME.removesuffix(".weight")
    inside, outside = u[:, :2].double() @ q[:, :2].double().T, orthonormal(40, 40, 7)
    rest = outside - u.double() @ (u.double().T @ outside)
    delta = inside + (rest[:, :2] / rest[:, :2].norm(dim=0)) @ orthonormal(30, 2, 9).T
    found = of({NAME: weight}, {NAME: weight + delta}, tmp_path, spans=spans_of(u, q, layer))
    (row,) = found["captured"]
    energy = float(delta.square().sum())
    assert row["output"]["mean"] == pytest.approx(2 / energy, rel=1e-4)
    assert row["span"] is None and row["count"] == 1
    # one layer: no spread between layers
    assert row["output"]["low"] == row["output"]["high"] == row["output"]["mean"]
    null = found["matrices"][0]["captured"]["random_output"]
    assert null["low"] < 8 / 40 < null["high"]


def test_transposed_weights_are_held_against_the_right_sides(tmp_path):
    u, q = orthonormal(20, 3, 0).float(), orthonormal(20, 3, 1).float()
    delta, layer = (u.double() @ q.double().T).T, NAME.removesuffix(".weight")
    spans = spans_of(u, q, layer)
    turned = Spans(spans.bases, {}, frozenset({layer}))
    weight = orthonormal(20, 20, 5)
    pairs = WeightPairs(saved(tmp_path / "a", {NAME: weight}), saved(tmp_path / "b", {NAME: weight + delta}))
    assert measure_update(pairs, spans=turned)["captured"][0]["both"]["mean"] == pytest.approx(1, rel=1e-4)
    assert measure_update(pairs, spans=spans)["captured"][0]["both"]["mean"] < 0.5


def test_a_trained_model_s_update_is_held_against_its_own_forks(tmp_path):
    base, tuned = eager(llama(tied=False)), eager(llama(tied=False))
    with torch.no_grad():
        for p in tuned.parameters():
            p += 0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    for name, model in (("base", base), ("tuned", tuned)):
        model.save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
    asked = {"base": str(tmp_path / "base"), "tuned": str(tmp_path / "tuned"), "top": 2, "count": 6}
    plan = MeasurePlan.model_validate(asked | {"task": {"name": "multiplication"}})
    found = measure_update(WeightPairs(plan.base, plan.tuned), top=2, spans=read_spans(plan))
    whole = next(row for row in found["captured"] if row["layers"] == "all layers")
    assert whole["count"] == LAYERS
    # a random update lies in any span by chance
    assert whole["output"]["low"] - 0.02 < whole["random_output"] < whole["output"]["high"] + 0.02
    assert {row["weights"] for row in found["rows"]} >= {"q_proj", "embed_tokens", "all matrices", "norms and biases"}


def test_a_diverged_model_is_refused(tmp_path):
    with pytest.raises(Refusal, match="NaN"):
        of({NAME: torch.ones(3, 3)}, {NAME: torch.full((3, 3), float("nan"))}, tmp_path)
