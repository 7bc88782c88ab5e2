"""What several processes count, find or fail at together; on one process there is nothing to do.

Decisions: every rank calls every function here, whatever its data: no collective stands in a branch that depends on
data. What must be equal bit for bit is found on one rank and handed to the others, not found by each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import distributed

Found = TypeVar("Found")
Number = TypeVar("Number", int, float)


def several() -> bool:
    """Whether there is a process group at all."""
    return distributed.is_available() and distributed.is_initialized()


def rank() -> int:
    """This process's number; 0 where there is one process."""
    return distributed.get_rank() if several() else 0


def ranks() -> int:
    """Number of processes; 1 where there is no process group."""
    return distributed.get_world_size() if several() else 1


def summed(count: Number) -> Number:
    """Sum of a number over all ranks, in their order."""
    if not several():
        return count
    counts: list[Any] = [None] * ranks()
    distributed.all_gather_object(counts, count)
    found: Any = sum(counts)
    return found


def from_first(find: Callable[[], Found]) -> Found:
    """What ``find`` gives on rank 0, the same bits on every rank; what it raises there is raised on all."""
    if not several():
        return find()
    outcome: list[Any] = [None]
    if rank() == 0:
        try:
            outcome[0] = find()
        except (ValueError, RuntimeError, OSError) as error:
            outcome[0] = error
    distributed.broadcast_object_list(outcome)
    found: Any = outcome[0]
    if isinstance(found, Exception):
        raise found
    return found


@contextlib.contextmanager
def all_or_none(what: str) -> Iterator[None]:
    """A block that fails on one rank fails on all at its end: nobody waits for a rank that has given up.

    Raises:
        RuntimeError: another rank failed; its own error is raised there.
    """
    done = False
    try:
        yield
        done = True
    finally:
        failed = summed(int(not done))
    if failed:
        raise RuntimeError(f"{what} failed on {failed} other rank{'s' * (failed > 1)}; see the error there.")
