"""Tells the largest memory that a run took in its process.

Decisions: Linux forgets an earlier peak when it is told to, so that runs which follow each other in one process have
their own; elsewhere the peak is the process's, and a run that is not its first has none.
"""

import resource
from pathlib import Path

_STATUS, _FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Peak:
    """Largest resident memory since this object was made."""

    def __init__(self, *, first: bool) -> None:
        try:
            _FORGET.write_text("5")
            self._own = True
        except OSError:
            self._own = False
        self._first = first

    def bytes(self) -> int | None:
        """The peak until now; None where the system keeps one for the process, and an earlier run had part in it."""
        if self._own:
            line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
            return int(line.split()[1]) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if self._first else None
