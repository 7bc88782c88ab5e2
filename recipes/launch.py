"""Starts the processes that train arms, one per rank, and sees that none of them outlives this one.

Decisions: DeepSpeed's own launcher where the recipe has a DeepSpeed configuration, torchrun for several ranks without
one, and no launcher for a single process. DeepSpeed's part for one machine is called directly: the part in front of it
looks for other machines, ignores CUDA_VISIBLE_DEVICES and loses the exit code of a killed process. Every rank watches
its stdin, a pipe from here, and ends when it is closed. The system closes it even if this process is killed.

    python -m forklora.recipes.launch RECIPE.json ARM [RECIPE.json ARM ...]    (one rank; the launchers start it)
"""

import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from forklora.recipes.config import Recipe

_RANK = "forklora.recipes.launch"


def arm_command(recipe: Recipe, arguments: Sequence[str]) -> list[str]:
    """The command line that starts every rank with these arguments."""
    if recipe.deepspeed is not None:
        return deepspeed_command(_devices(recipe.ranks), [_RANK, *arguments], quiet=True)
    if recipe.ranks > 1:
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={recipe.ranks}"]
        return [sys.executable, "-m", *launcher, "--module", _RANK, *arguments]
    return [sys.executable, "-m", _RANK, *arguments]


def deepspeed_command(devices: Sequence[int | str], module: Sequence[str], *, quiet: bool = False) -> list[str]:
    """How DeepSpeed's launcher for one machine starts a module with its arguments once for each device."""
    world = base64.urlsafe_b64encode(json.dumps({"localhost": devices}).encode()).decode()
    launcher = ["deepspeed.launcher.launch", f"--world_info={world}", f"--master_port={_free_port()}"]
    return [sys.executable, "-m", *launcher, *["--quiet"] * quiet, "--no_local_rank", "--module", *module]


def _devices(ranks: int) -> Sequence[int | str]:
    """One accelerator for each rank, of those that CUDA_VISIBLE_DEVICES leaves visible."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ""
    return [name.strip() for name in visible.split(",")][:ranks] if visible else list(range(ranks))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(recipe: Recipe, arguments: Sequence[str]) -> int:
    """Run all ranks of an arm to their end; returns the exit code, which is 0 only if every rank's is.

    When a rank fails its launcher ends the others; on an interruption all are killed before it is passed on.
    """
    with ranks_running(recipe, arguments) as process:
        return process.wait()


@contextlib.contextmanager
def ranks_running(
    recipe: Recipe, arguments: Sequence[str], *, beside: int = 1, log: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Within the block the ranks of one or more arms run; at its end none of them does.

    Args:
        recipe: how they are launched.
        arguments: pairs of recipe file and arm, one after the other.
        beside: how many such launches share this machine's cores.
        log: file for what they say; None is stderr.
    """
    threads = str(max(1, (os.cpu_count() or 1) // (recipe.ranks * beside)))
    # threads that wait asleep leave the cores to the launches beside
    shared = {} if recipe.ranks * beside == 1 else {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}
    command = arm_command(recipe, arguments)
    with contextlib.ExitStack() as stack:
        stack.callback(sweep, command)
        # what libraries say is no part of the result
        said = 2 if log is None else stack.enter_context(log.open("ab"))
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=None if log is None else said,
            env={**shared, **os.environ},
            start_new_session=True,  # an interruption from the keyboard comes here, and only here
        )
        try:
            yield process
        finally:
            process.stdin.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def sweep(command: Sequence[str]) -> None:
    """Remove what ranks that are gone have left in shared memory.

    On a CPU each rank of DeepSpeed makes a buffer of 66 MiB there, named after its launcher's port, and never removes
    it: a few hundred launches fill the memory of a machine.
    """
    for port in (word.partition("=")[2] for word in command if word.startswith("--master_port=")):
        for buffer in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
            buffer.unlink(missing_ok=True)


def end_with_parent() -> None:
    """End this process, whatever it is doing, as soon as its stdin is closed."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """One rank: watches its parent from before the long imports on, then trains; rank 0 speaks for all."""
    end_with_parent()
    if os.environ.get("RANK", "0") != "0":
        os.environ["TQDM_DISABLE"] = "1"
        warnings.simplefilter("ignore")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # errors stay: they go to stderr
    from forklora.recipes.arm import run_from_shell

    for file, arm in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        run_from_shell(file, arm)


if __name__ == "__main__":
    main()
