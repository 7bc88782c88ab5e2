"""The process of one side of a benchmark, seen from its parent: started, asked for steps, ended whatever happens."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from forklora.recipes.bench_plan import SideSpec

_LAST_LINES = 2_000  # bytes of what a side printed that are read for its last words


class SideError(RuntimeError):
    """A side's process is gone; the message says how it ended."""


class SideProcess:
    """A side as a context: it gets ready by itself, steps when told to, and is killed at the end."""

    def __init__(self, spec: SideSpec) -> None:
        self._spec = spec

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="forklora-bench-"))
            self._log = stack.enter_context((Path(folder) / "log").open("w+b"))
            reading, writing = os.pipe()
            self._answers = stack.enter_context(os.fdopen(reading, encoding="utf-8"))
            command = [sys.executable, "-m", "forklora.recipes.bench_side", self._spec.model_dump_json(), folder]
            try:
                self._process = subprocess.Popen(
                    [*command, str(writing)],
                    stdin=subprocess.PIPE,
                    stdout=self._log,
                    stderr=self._log,
                    pass_fds=[writing],
                )
            finally:
                os.close(writing)
            stack.callback(self._end)
            self._held = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()

    def step(self) -> dict[str, Any]:
        """Let the side take a step; returns what it took. Raises SideError if the process is gone."""
        with contextlib.suppress(BrokenPipeError):  # a dead process has no answer, which says it all
            os.write(self._process.stdin.fileno(), b"go\n")
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The side's next answer; the first one, without a step, is its greeting. Raises SideError."""
        line = self._answers.readline()
        if not line.endswith("\n"):
            raise SideError(self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        code = self._process.wait()
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - _LAST_LINES))
        lines = self._log.read().decode(errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        if code < 0:
            name = signal.Signals(-code).name
            return f"killed by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"
        return f"exit code {code}: {said}"

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
