"""One side's process: its bases, the figures of a step, and that it ends whatever happens."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forklora.recipes.bench_plan import SideSpec, read_shape
from forklora.recipes.bench_process import SideError, SideProcess
from forklora.recipes.bench_side import Paced, random_bases, step_figures

from tiny_policy import LAYERS, llama, tokenizer


def spec_of(folder, shape="8/4/2"):
    return SideSpec(
        side="trl", shape=read_shape(shape), model={"name": str(folder), "dtype": "float32"}, repeats=1, seed=0
    )


def test_random_bases_are_one_unit_direction_for_each_layer():
    bases = random_bases(llama(), seed=0)
    assert len(bases) == LAYERS
    assert all(b.shape[1] == 1 and float(b.norm()) == pytest.approx(1) for b in bases.values())
    assert bases["model.layers.0.mlp.up_proj"].shape[0] == 48


def test_the_update_is_all_of_a_step_but_sampling_and_scoring_and_short_completions_are_an_error():
    logs = {"completions/mean_length": 99.0, "seconds/sampling": 1.0, "seconds/scoring": 0.5, "memory/peak_mib": 7.0}
    found = step_figures(logs, seconds=4.0, asked=100)
    assert (found["update"], found["seconds"], found["peak_mib"], found["mean_length"]) == (2.5, 4.0, 7.0, 99.0)
    with pytest.raises(ValueError, match="completions have 98.9 tokens on average, not 100"):
        step_figures(logs | {"completions/mean_length": 98.9}, seconds=4.0, asked=100)


class Waiting:
    """A parent that takes its time to say go."""

    def __init__(self):
        self.heard = []

    def wait(self):
        time.sleep(0.2)

    def answer(self, content):
        self.heard.append(content)


def test_seconds_run_from_the_go_to_the_end_of_the_step_and_the_greeting_comes_once():
    parent, logs = Waiting(), {"seconds/sampling": 0.0, "seconds/scoring": 0.0, "memory/peak_mib": 7.0, "loss": 0.0}
    paced = Paced(read_shape("8/4/2"), parent, greeting={"hello": 1})
    for pause in (0.1, 0.0):
        paced.on_step_begin(None, None, None)
        time.sleep(pause)
        paced.on_step_end(None, None, None)
        paced.on_log(None, None, None, logs=logs | {"completions/mean_length": 4.0})
    paced.on_log(None, None, None, logs={"train_loss": 0.0})
    hello, first, second = parent.heard
    assert hello == {"hello": 1}
    assert 0.1 <= first["seconds"] < 0.2 and second["seconds"] < 0.1


def test_a_side_that_cannot_start_or_is_killed_says_how_it_ended(tmp_path, monkeypatch):
    spec = spec_of(tmp_path / "missing")
    code = "import sys, time; {}"
    real = subprocess.Popen

    def popen(body):
        return lambda command, **kwargs: real([sys.executable, "-c", code.format(body), command[-1]], **kwargs)

    monkeypatch.setattr(subprocess, "Popen", popen("print('noise'); sys.exit('the cause')"))
    with SideProcess(spec) as process, pytest.raises(SideError, match="exit code 1: the cause"):
        process.step()
    monkeypatch.setattr(subprocess, "Popen", popen("time.sleep(60)"))
    with SideProcess(spec) as process:
        process._process.send_signal(signal.SIGKILL)
        with pytest.raises(SideError, match=r"killed by SIGKILL \(out of memory\?\)"):
            process.answer()
    with SideProcess(spec) as process:
        left = process._process
    assert left.poll() == -signal.SIGKILL


@pytest.mark.slow
def test_a_side_ends_with_its_parent_in_the_middle_of_a_step(tmp_path):
    llama(tied=False).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    spec = spec_of(tmp_path, "8/200/8/64/512").model_dump_json()
    code = (
        "import os, sys, time; from forklora.recipes.bench_process import SideProcess; "
        "from forklora.recipes.bench_plan import SideSpec; spec = SideSpec.model_validate_json(sys.argv[1]); "
        "side = SideProcess(spec).__enter__(); side.answer(); "
        "os.write(side._process.stdin.fileno(), b'go\\n'); time.sleep(0.3); "
        "print(side._process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    said = subprocess.run([sys.executable, "-c", code, spec], capture_output=True, text=True, timeout=120).stdout
    status = Path(f"/proc/{int(said)}/stat")
    deadline = time.monotonic() + 1.5  # far less than the step would take
    while status.exists() and status.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not status.exists() or status.read_text().split()[2] == "Z"
