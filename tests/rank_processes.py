"""A real `forklora run` with two ranks, its processes, and whether they are gone."""

import json
import subprocess
import sys
import time

import psutil

from tiny_policy import recipe_of

COMMAND = "import sys; from forklora.recipes.cli import main; sys.exit(main())"
RANK = "forklora.recipes.launch"


def started(folder, *overrides):
    """`forklora run` of a tiny recipe in a process of its own, once all its ranks are there: (run, ranks)."""
    recipe = recipe_of(folder, steps=1000)
    content = recipe.model_dump(mode="json") | {"arms": [recipe.arms[1].model_dump(mode="json")]}
    (folder / "tiny.yaml").write_text(json.dumps(content))
    run = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "run", str(folder / "tiny.yaml"), *overrides],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        below = psutil.Process(run.pid).children(recursive=True)
        ranks = [p for p in below if "launcher" not in (line := " ".join(cmdline(p))) and RANK in line]
        ranks = [p for p in ranks if "torch.distributed.run" not in " ".join(cmdline(p))]
        if len(ranks) == 2:
            return run, ranks, below
        time.sleep(0.1)
    raise AssertionError("the ranks did not come up")


def cmdline(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def gone(processes, *, within=15):
    return not psutil.wait_procs(processes, timeout=within)[1]
