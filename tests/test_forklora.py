"""The front door: names are found in their rooms, nothing is loaded before it is asked for."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import forklora
from forklora import trainers

ROOMS = {path.stem for path in Path(forklora.__file__).parent.glob("*.py")}


@pytest.mark.parametrize("door", [forklora, trainers], ids=lambda door: door.__name__)
def test_every_name_is_what_its_room_defines(door):
    for name in door.__all__:
        room = import_module(door._ROOMS[name])
        assert getattr(door, name) is getattr(room, name)
        assert name in dir(door)


def test_no_name_is_a_room():
    # The import system sets the attribute `forklora.room` when the room is loaded, over any name of the same spelling.
    assert not ROOMS & set(forklora.__all__)


def test_type_checkers_see_the_same_names_and_rooms():
    tree = ast.parse(Path(forklora.__file__).read_text(encoding="utf-8"))
    imports = [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module.startswith("forklora.")
    ]
    seen = {alias.asname: node.module for node in imports for alias in node.names if alias.asname == alias.name}
    assert seen == {name: room for name, room in forklora._ROOMS.items() if room != "forklora.trainers"}


@pytest.mark.parametrize("door", [forklora, trainers], ids=lambda door: door.__name__)
def test_an_unknown_name_is_answered_with_the_names_there_are(door):
    with pytest.raises(AttributeError, match="no attribute 'ForkLora'; it offers .*ForkGRPOTrainer"):
        door.ForkLora  # noqa: B018


def test_the_trainers_package_does_not_load_trl():
    code = "import sys, forklora.trainers, forklora.recipes; sys.exit('trl' in sys.modules or 'peft' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
