"""Laws of checkpoints: whole once sealed, never before, and whoever resumes gets the latest whole one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forklora.trainers.checkpoints import SEAL, break_seal, checked, latest_whole, seal, what_is_missing

from forklora.adapter import KINDS
from forklora.archive import load_tensors
from forklora.state import adapter_tensors
from tiny_policy import prompts, trainer_of

OPTIONS = {"max_steps": 6, "save_strategy": "steps", "save_steps": 1}


def folder(root, step, *, sealed=True):
    made = root / f"checkpoint-{step}"
    (made / "inner").mkdir(parents=True)
    (made / "weights").write_bytes(b"12345")
    (made / "inner" / "state").write_bytes(b"")
    if sealed:
        seal(made)
    return made


def test_a_sealed_folder_is_whole_until_anything_of_it_is_lost(tmp_path):
    made = folder(tmp_path, 1)
    assert what_is_missing(made) is None and checked(made) == made
    (made / "weights").write_bytes(b"123")
    assert "weights" in what_is_missing(made)
    (made / "weights").write_bytes(b"12345")
    assert what_is_missing(made) is None
    (made / "inner" / "state").unlink()
    assert "inner/state" in what_is_missing(made)
    break_seal(made)
    assert what_is_missing(made) == "it was never finished"
    (made / SEAL).write_text("{")
    assert "damaged" in what_is_missing(made)


def test_the_latest_whole_one_is_found_by_its_step(tmp_path):
    assert latest_whole(tmp_path) is None
    for step in (2, 10, 9):
        folder(tmp_path, step)
    folder(tmp_path, 11, sealed=False)
    (tmp_path / "checkpoint-x").mkdir()
    assert latest_whole(tmp_path).name == "checkpoint-10"


def test_one_that_is_cut_short_is_refused_with_the_way_out(tmp_path):
    broken = folder(tmp_path, 3, sealed=False)
    with pytest.raises(ValueError, match=r"never finished; there is no whole one"):
        checked(broken)
    folder(tmp_path, 2)
    with pytest.raises(ValueError, match=r"resume from .*checkpoint-2"):
        checked(broken)
    with pytest.raises(ValueError, match="no such folder"):
        checked(tmp_path / "checkpoint-7")


def test_a_trainer_resumes_from_whole_checkpoints_only(tmp_path):
    options = {**OPTIONS, "max_steps": 3}
    whole = trainer_of(tmp_path, **options)
    whole.train()
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*") if what_is_missing(p) is None) == [
        "checkpoint-1", "checkpoint-2", "checkpoint-3",
    ]  # fmt: skip
    break_seal(tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-3" / "optimizer.pt").unlink()
    again = trainer_of(tmp_path, **options)
    with pytest.raises(ValueError, match=r"resume from .*checkpoint-2"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3 and what_is_missing(tmp_path / "checkpoint-3") is None
    found = adapter_tensors(again.model)
    assert all(torch.equal(found[name], tensor) for name, tensor in adapter_tensors(whole.model).items())
    with pytest.raises(ValueError, match="holds no whole checkpoint"):
        trainer_of(tmp_path / "empty", **options).train(resume_from_checkpoint=True)


def test_the_limit_on_checkpoints_never_costs_the_last_whole_one(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path, **{**OPTIONS, "max_steps": 3}, save_total_limit=1)
    seen = []
    real = type(trainer).write_extras

    def watched(self, made):
        seen.append([p.name for p in tmp_path.glob("checkpoint-*") if what_is_missing(p) is None])
        real(self, made)

    monkeypatch.setattr(type(trainer), "write_extras", watched)
    trainer.train()
    assert seen == [[], ["checkpoint-1"], ["checkpoint-2"]]
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    assert trainer.args.save_total_limit == 1


_SCRIPT = """
import sys
from pathlib import Path
from forklora.trainers.bridge import CheckpointedGRPOTrainer
from tiny_policy import trainer_of
from forklora.state import adapter_tensors
import torch
folder, where = Path(sys.argv[1]), sys.argv[2]
trainer = trainer_of(folder, max_steps=6, save_strategy="steps", save_steps=1)
def stop(*_, **__):
    if trainer.state.global_step >= 3:
        print("here", flush=True)
        import time
        time.sleep(60)
if where == "step":
    real = trainer.policy_loss
    trainer.policy_loss = lambda *a, **k: (stop(), real(*a, **k))[1]
if where == "save":
    trainer.write_extras = stop
trainer.train(resume_from_checkpoint=True if where == "resume" else None)
torch.save(adapter_tensors(trainer.model), folder / "end.pt")
"""


def started(root: Path, where: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _SCRIPT, str(root), where]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["step", "save"])
def test_a_run_killed_in_the_middle_ends_with_the_weights_of_one_that_was_not(where, tmp_path):
    whole = started(tmp_path / "whole", "nowhere")
    killed = started(tmp_path / "killed", where)
    while "here" not in (line := killed.stdout.readline()):
        assert line or killed.poll() is None, "ended before it was killed"
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    last = latest_whole(tmp_path / "killed")
    assert last.name == ("checkpoint-3" if where == "step" else "checkpoint-2")
    assert started(tmp_path / "killed", "resume").wait(timeout=120) == 0
    assert whole.wait(timeout=120) == 0
    expected, found = (torch.load(tmp_path / name / "end.pt") for name in ("whole", "killed"))
    assert expected and all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_checkpoint_is_kept_and_loaded_at_the_end(kind, tmp_path):
    options = {"kind": kind, "max_steps": 4, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    judged = {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward", "greater_is_better": True}
    watched = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": prompts(count=4)}
    trainer = trainer_of(tmp_path, per_device_eval_batch_size=4, **options, **judged, **watched)
    trainer.train()
    rewards = [line["eval_reward"] for line in trainer.state.log_history if "eval_reward" in line]
    best = tmp_path / f"checkpoint-{rewards.index(max(rewards)) + 1}"
    assert trainer.state.best_model_checkpoint == str(best) and what_is_missing(best) is None
    expected = load_tensors(best / "adapter_state.safetensors", kind="adapter state")[0]
    found = adapter_tensors(trainer.model)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-7)
