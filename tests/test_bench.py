"""A benchmark: ratios, turns, what is measured again, and one real comparison of both trainers."""

import json

import pytest
from forklora.recipes import bench
from forklora.recipes.bench import check_plan, finished_entries, measure, ratios, run_bench
from forklora.recipes.bench_plan import BenchPlan, Point, read_shape
from forklora.recipes.bench_process import SideError
from forklora.recipes.cli import main

from tiny_policy import llama, tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny policy in a folder."""
    folder = tmp_path_factory.mktemp("policy")
    llama(tied=False).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def tiny_plan(folder, model="nowhere", **changes):
    given = {"model": {"name": str(model), "dtype": "float32"}, "shapes": ["8/4/2/2/4"], "repeats": 1, "growth": False}
    return BenchPlan.model_validate(given | {"output": str(folder)} | changes)


def step(seconds, *, sampling=0.5, scoring=0.25, peak=100.0):
    update = seconds - sampling - scoring
    return {"seconds": seconds, "sampling": sampling, "scoring": scoring, "update": update, "peak_mib": peak}


def side(*seconds, peak=100.0, failed=None):
    return {"steps": [step(s, peak=peak) for s in seconds], "peak_mib": peak, "failed": failed}


def test_what_the_model_cannot_take_is_refused(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "SideProcess", None)  # nothing may be started
    asked = [f"output={tmp_path}", "growth=false"]
    for given, said in (
        ([f"model.name={model}", "shapes=250/8/2"], "has room for 256 tokens"),
        ([f"model.name={model}", "shapes=1/8/2/40"], "cannot make 120 different prompts of exactly 1 tokens"),
        ([f"model.name={tmp_path}"], f"cannot use the model {str(tmp_path)!r}"),
    ):
        assert main(["bench", *given, "repeats=1", *asked]) == 2
        assert said in capsys.readouterr().err
    check_plan(tiny_plan(tmp_path, model))


def test_ratios_pair_steps_that_followed_each_other():
    theirs, ours = side(4.0, 9.0, 2.5, peak=300.0), side(2.0, 3.0, 2.5, peak=200.0)
    found = ratios(theirs, ours)
    assert found["step"] == {"median": 2.0, "low": 1.0, "high": 3.0}
    assert found["update"] == pytest.approx({"median": 3.25 / 1.25, "low": 1.0, "high": 8.25 / 2.25})
    assert found["scoring"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert found["memory"]["median"] == 1.5
    ours["steps"][1]["sampling"] = 0.0  # below the clock's last digit
    assert ratios(theirs, ours)["sampling"] is None
    assert ratios(theirs, side(failed="out of memory")) == ratios(side(failed="x"), ours) == {}


class Scripted:
    """Stands in for a side's process: a greeting, then steps; the side named in `dies` ends at that turn."""

    dies: dict = {}
    calls: list = []

    def __init__(self, spec):
        self.name, self.turn = spec.side, 0

    def __enter__(self):
        self.calls.append(("enter", self.name))
        return self

    def __exit__(self, *_):
        self.calls.append(("exit", self.name))

    def answer(self):
        if self.dies.get(self.name) == self.turn:
            raise SideError("gone")
        return {"prompts": "digest"}

    def step(self):
        self.turn += 1
        self.answer()
        self.calls.append((self.turn, self.name))
        return step(float(self.turn + 1), peak=100.0 * self.turn)


@pytest.fixture
def scripted(monkeypatch):
    monkeypatch.setattr(Scripted, "calls", [])
    monkeypatch.setattr(Scripted, "dies", {})
    monkeypatch.setattr(bench, "SideProcess", Scripted)
    return Scripted


def test_sides_take_turns_and_a_dead_one_leaves_the_other_standing(scripted):
    plan = tiny_plan("out", repeats=2)
    specs = {name: plan.spec(name, read_shape("8/4/2")) for name in ("trl", "ours")}
    told = []
    found = measure(specs, told=told.append, done=lambda: None)
    both = [("enter", "trl"), ("enter", "ours")] + [(turn, name) for turn in (1, 2, 3) for name in ("trl", "ours")]
    assert scripted.calls == [*both, ("exit", "ours"), ("exit", "trl")]
    assert told == ["trl", "ours"] * 4
    for record in found.values():
        assert record["warm_up"]["seconds"] == 2.0
        assert [s["seconds"] for s in record["steps"]] == [3.0, 4.0]
        assert (record["peak_mib"], record["failed"], record["prompts"]) == (300.0, None, "digest")
    for turn, kept in ((0, 0), (1, 0), (3, 1)):
        scripted.dies = {"trl": turn}
        found = measure(specs, told=told.append, done=lambda: None)
        assert (found["trl"]["failed"], len(found["trl"]["steps"])) == ("gone", kept)
        assert len(found["ours"]["steps"]) == 2 and found["ours"]["failed"] is None


def test_a_finished_shape_is_kept_and_anything_else_measured_again(scripted, tmp_path, monkeypatch):
    def measured(**changes):
        scripted.calls.clear()
        overwrite = changes.pop("overwrite", False)
        run_bench(tiny_plan(tmp_path, **changes), overwrite=overwrite)
        return sum(call[0] == "enter" for call in scripted.calls)

    two = ["8/4/2/2/4", "8/4/2/4/4"]
    assert measured() == 2
    assert measured() == 0
    assert measured(overwrite=True) == 2
    assert measured(shapes=two) == 2
    entries = json.loads((tmp_path / "bench.json").read_text())["shapes"]
    assert [entry["shape"]["prompts"] for entry in entries] == [2, 4]
    assert measured(shapes=two[::-1]) == 0
    assert measured(shapes=two, seed=1) == 4
    assert measured(shapes=two, seed=1, repeats=2) == 4
    scripted.dies = {"ours": 2}
    assert measured(shapes=["9/4/2/2/4"]) == 2
    assert measured(shapes=["9/4/2/2/4"]) == 2  # it had failed
    scripted.dies = {}
    monkeypatch.setattr(bench, "provenance", lambda: dict(versions={"torch": "0"}, hardware={}, commit="", dirty=None))
    assert measured(shapes=["9/4/2/2/4"]) == 2
    assert measured(shapes=["9/4/2/2/4"]) == 0
    monkeypatch.setattr(bench, "provenance", lambda: dict(versions={"torch": "1"}, hardware={}, commit="", dirty=None))
    assert measured(shapes=["9/4/2/2/4"]) == 2  # numbers of another version do not mix
    for broken in ("", "[]", "{"):
        (tmp_path / "bench.json").write_text(broken)
        assert finished_entries(tmp_path / "bench.json", bench.provenance()) == []


def test_an_interruption_keeps_what_is_finished(scripted, tmp_path, monkeypatch):
    two = ["8/4/2/2/4", "8/4/2/4/4"]
    real = bench.measure

    def interrupted(specs, **kwargs):
        if specs["ours"].shape.prompts == 4:
            raise KeyboardInterrupt
        return real(specs, **kwargs)

    monkeypatch.setattr(bench, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_bench(tiny_plan(tmp_path, shapes=two))
    assert [e["shape"]["prompts"] for e in json.loads((tmp_path / "bench.json").read_text())["shapes"]] == [2]


def test_growth_is_measured_on_our_side_only_and_a_failure_is_code_one(scripted, tmp_path, monkeypatch, capsys):
    points = (Point("rollouts", 1, "8/4/2/2"), Point("vocabulary", 4, "8/4/2/2", 300))
    monkeypatch.setattr("forklora.recipes.bench_plan.GROWTH", points)
    monkeypatch.setattr(bench, "check_plan", lambda plan: None)
    arguments = ["bench", "shapes=8/4/2/2/4", "repeats=1", f"output={tmp_path}", "--json", str(tmp_path / "copy.json")]
    assert main(arguments) == 0
    result = json.loads((tmp_path / "bench.json").read_text())
    assert json.loads((tmp_path / "copy.json").read_text()) == result
    assert [call[1] for call in scripted.calls if call[0] == "enter"] == ["trl", "ours", "ours", "ours"]
    assert [(e["family"], e["factor"], e.get("vocabulary")) for e in result["growth"]] == [
        ("rollouts", 1, None), ("vocabulary", 4, 300),
    ]  # fmt: skip
    assert result["growth"][1]["task"]["model"] == {"name": "random", "dtype": "float32"}
    assert {"plan", "versions", "hardware", "commit"} <= result.keys()
    said = capsys.readouterr().out
    assert "8/4/2/2/4" in said and "1.00 (1.00–1.00)" in said and "random bases" in said
    scripted.dies = {"ours": 2}
    assert main([*arguments, "--overwrite"]) == 1
    assert "forklora: shape 8/4/2/2/4, ours: gone" in capsys.readouterr().err


def test_one_real_comparison_of_both_trainers_in_their_own_processes(model, tmp_path):
    arguments = [f"model.name={model}", "model.dtype=float32", "shapes=8/4/2/2/4", "repeats=1", "growth=false"]
    assert main(["bench", *arguments, f"output={tmp_path}"]) == 0
    (entry,) = json.loads((tmp_path / "bench.json").read_text())["shapes"]
    for name in ("trl", "ours"):
        own = entry[name]
        assert own["failed"] is None
        (timed,) = own["steps"]
        for taken in (own["warm_up"], timed):
            assert taken["mean_length"] == 4
            assert min(taken["sampling"], taken["update"]) > 0
            assert taken["sampling"] + taken["scoring"] + taken["update"] == pytest.approx(taken["seconds"])
        assert own["peak_mib"] >= timed["peak_mib"] >= own["ready_mib"] > 100
    assert entry["trl"]["prompts"] == entry["ours"]["prompts"]
    assert entry["ours"]["steps"][0]["carrying_rows"] == 1.0  # nothing is skipped
    (theirs,), (ours,) = entry["trl"]["steps"], entry["ours"]["steps"]
    assert entry["ratios"]["step"]["median"] == pytest.approx(theirs["seconds"] / ours["seconds"])
    assert (tmp_path / "bench.svg").read_text().startswith("<svg xmlns")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json", "bench.svg"]
