"""Ranks: the right launcher for each recipe, exit codes that mean something, and nobody left behind."""

import base64
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forklora.recipes.launch import arm_command, run_ranks, sweep

from rank_processes import RANK, gone, started
from tiny_policy import recipe_of


@pytest.fixture
def recipe(tmp_path):
    return recipe_of(tmp_path)


def command_of(recipe, **changes):
    """The command after the interpreter."""
    python, dash, *rest = arm_command(recipe.model_copy(update=changes), ["recipe.json", "arm"])
    assert (python, dash) == (sys.executable, "-m")
    return rest


def world(command):
    (found,) = [word.partition("=")[2] for word in command if word.startswith("--world_info=")]
    return json.loads(base64.urlsafe_b64decode(found))


ARM = [RANK, "recipe.json", "arm"]


def test_one_process_needs_no_launcher(recipe):
    assert command_of(recipe) == ARM


def test_several_ranks_without_deepspeed_go_through_torchrun(recipe):
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node=4", "--module"]
    assert command_of(recipe, ranks=4) == [*launcher, *ARM]


@pytest.mark.parametrize("ranks", [1, 2])
def test_deepspeed_goes_through_its_own_launcher(recipe, ranks, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    command = command_of(recipe, ranks=ranks, deepspeed="zero2")
    assert command[0] == "deepspeed.launcher.launch"
    assert command[-6:] == ["--quiet", "--no_local_rank", "--module", *ARM]
    assert world(command) == {"localhost": list(range(ranks))}


def test_ranks_stay_on_the_accelerators_that_are_visible(recipe, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6, 4,GPU-8a")
    assert world(command_of(recipe, ranks=2, deepspeed="zero2")) == {"localhost": ["6", "4"]}
    assert world(command_of(recipe, ranks=3, deepspeed="zero2")) == {"localhost": ["6", "4", "GPU-8a"]}


def test_runs_side_by_side_get_ports_of_their_own(recipe):
    ports = {word for _ in range(8) for word in command_of(recipe, deepspeed="zero1") if "--master_port=" in word}
    assert len(ports) > 1


def test_what_ranks_leave_in_shared_memory_goes_with_their_launch(recipe):
    command = arm_command(recipe.model_copy(update={"deepspeed": "zero2", "ranks": 2}), ["recipe.json", "arm"])
    (port,) = [word.partition("=")[2] for word in command if word.startswith("--master_port=")]
    mine = [Path(f"/dev/shm/deepspeed_allreduce_buffer_0_127.0.0.1_{port}_{rank}") for rank in range(2)]
    others = Path(f"/dev/shm/deepspeed_allreduce_buffer_0_127.0.0.1_{port}1_0")
    try:
        for path in (*mine, others):
            path.write_bytes(b"left")
        sweep(command)
        assert not any(path.exists() for path in mine)
        assert others.exists()
        sweep(arm_command(recipe, ["recipe.json", "arm"]))  # without DeepSpeed there is nothing to sweep
        assert others.exists()
    finally:
        for path in (*mine, others):
            path.unlink(missing_ok=True)


def test_the_exit_code_is_the_arms(recipe, capfd):
    assert run_ranks(recipe, ["nowhere.json", "arm"]) == 1
    assert "nowhere.json" in capfd.readouterr().err


def test_a_rank_ends_when_the_other_end_of_its_stdin_does():
    code = (
        "import time; from forklora.recipes.launch import end_with_parent; end_with_parent(); print('up', flush=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}; time.sleep(60)"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"up\n"
    process.stdin.write(b"a word says nothing\n")
    process.stdin.flush()
    time.sleep(0.3)
    assert process.poll() is None
    process.stdin.close()
    assert process.wait(timeout=10) == 1
    process.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize("deepspeed", ["zero2", "null"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_the_run_ends_its_ranks(deepspeed, how, tmp_path):
    run, ranks, below = started(tmp_path, "ranks=2", f"deepspeed={deepspeed}")
    run.send_signal(how)
    _, said = run.communicate(timeout=30)
    assert gone(below)
    record = Path(tmp_path / "run" / "plain" / "record.json")
    if how == signal.SIGINT:
        assert run.returncode == 130
        assert said.decode().splitlines()[-1] == "forklora: interrupted"
        assert json.loads(record.read_text())["status"] == "interrupted"
    else:
        assert run.returncode == -how
        assert not record.exists()


@pytest.mark.slow
@pytest.mark.parametrize("deepspeed", ["zero2", "null"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_takes_the_others_along(deepspeed, rank, tmp_path):
    run, ranks, below = started(tmp_path, "ranks=2", f"deepspeed={deepspeed}")
    os.kill(ranks[rank].pid, signal.SIGKILL)
    run.communicate(timeout=60)
    assert run.returncode == 1
    assert gone(below, within=1)
    assert json.loads((tmp_path / "run" / "plain" / "record.json").read_text())["status"] == "failed"
