"""How the processes of a group of cells are started."""

import base64
import json
import sys

from forklora.recipes.stages_group import command


def test_only_the_reference_runs_without_deepspeeds_launcher(tmp_path):
    assert command("none", 1, spec=tmp_path) == [sys.executable, "-m", "forklora.recipes.stages_side", str(tmp_path)]
    ports = set()
    for stage, ranks in (("none", 2), ("0", 1), ("3", 2)):
        found = command(stage, ranks, spec=tmp_path)
        assert found[:3] == [sys.executable, "-m", "deepspeed.launcher.launch"]
        (world,) = (word.partition("=")[2] for word in found if word.startswith("--world_info="))
        assert json.loads(base64.urlsafe_b64decode(world)) == {"localhost": list(range(ranks))}
        assert found[-3:] == ["--module", "forklora.recipes.stages_side", str(tmp_path)]
        ports |= {word for word in found if word.startswith("--master_port=")}
    assert len(ports) == 3  # groups beside each other do not meet
