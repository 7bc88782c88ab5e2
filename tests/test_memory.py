"""A run's own peak: what it allocates counts, what an earlier run in the process allocated does not."""

import numpy as np
import pytest
from forklora.recipes import memory
from forklora.recipes.memory import Peak

SIZE = 300 * 2**20


def used():
    """A block of memory that was really touched, and is gone again."""
    block = np.ones(SIZE, dtype=np.uint8)
    return int(block[0])


def test_each_run_has_its_own_peak():
    before = Peak(first=False).bytes()
    first = Peak(first=True)
    used()
    assert first.bytes() - before > 0.9 * SIZE
    second = Peak(first=False)
    assert second.bytes() - before < 0.5 * SIZE


@pytest.mark.parametrize(("first", "known"), [(True, True), (False, False)])
def test_where_the_system_keeps_one_peak_a_later_run_has_none(monkeypatch, tmp_path, first, known):
    monkeypatch.setattr(memory, "_FORGET", tmp_path / "no" / "such" / "file")
    peak = Peak(first=first).bytes()
    assert (peak is not None) == known
    assert peak is None or peak > 10 * 2**20
