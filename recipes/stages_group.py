"""A group of processes that runs cells of one stage and one number of ranks: started, watched, ended whatever happens.

Several ranks, and any ZeRO stage, run under DeepSpeed's own launcher. Ranks read nothing from stdin; they end when it
closes, so that they cannot outlive the parent, however it ends. Everything is kept on the CPU.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from forklora.recipes.files import write_json
from forklora.recipes.launch import deepspeed_command, sweep
from forklora.recipes.stages_plan import Cell

_LAST_BYTES = 4_000  # of what a group printed that are read for its last words
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "TQDM_DISABLE": "1"}


class CellGroup:
    """Cells that run one after another in the same processes, as a context: everything is killed at its end."""

    def __init__(self, cells: list[Cell], *, output: Path, digest: str) -> None:
        self.cells, self.output, self.digest = cells, output, digest
        self.stage, self.ranks = cells[0].stage, cells[0].ranks

    def __enter__(self) -> Self:
        for cell in self.cells:
            shutil.rmtree(cell.folder(self.output), ignore_errors=True)
        place = self.output / "groups" / f"{self.stage}-{self.ranks}"
        spec = {"output": str(self.output), "digest": self.digest, "cells": [c.model_dump() for c in self.cells]}
        write_json(place.with_suffix(".json"), spec)
        self.log = place.with_suffix(".log")
        with self.log.open("wb") as log:
            self._command = command(self.stage, self.ranks, spec=place.with_suffix(".json"))
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ | _ENVIRONMENT,
                start_new_session=True,  # one signal reaches the launcher and all ranks
            )
        self.seen = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdin.close()
        sweep(self._command)

    @property
    def ended(self) -> bool:
        """Whether the group's processes are gone."""
        return self._process.poll() is not None

    def finished(self) -> int:
        """How many more cells are finished than at the last call; they leave ``cells``."""
        before = len(self.cells)
        self.cells = [cell for cell in self.cells if not (cell.folder(self.output) / "result.json").exists()]
        if len(self.cells) < before:
            self.seen = time.monotonic()
        return before - len(self.cells)

    @property
    def silence(self) -> float:
        """Seconds since the group started or finished a cell."""
        return time.monotonic() - self.seen

    def blamed(self) -> tuple[list[Cell], str]:
        """The cells that the end of the group speaks against, and the reason: all if it never began the first one."""
        cell = self.cells[0]
        said = [path.read_text(encoding="utf-8") for path in sorted(cell.folder(self.output).glob("error-*.txt"))]
        reason = "; ".join(dict.fromkeys(said)) or f"no word from a rank; last in the log: {self._last_words()}"
        return (self.cells[:1] if cell.folder(self.output).exists() else self.cells), reason

    def _last_words(self) -> str:
        lines = self.log.read_bytes()[-_LAST_BYTES:].decode(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "nothing")


def command(stage: str, ranks: int, *, spec: Path) -> list[str]:
    """How the processes of a group are started."""
    module = ["forklora.recipes.stages_side", str(spec)]
    if stage == "none" and ranks == 1:
        return [sys.executable, "-m", *module]
    return deepspeed_command(list(range(ranks)), module)
