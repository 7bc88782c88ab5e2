"""A process alone is rank 0 of 1; with others, everybody hears everybody (see also test_arm_ranks.py)."""

from forklora.recipes.ranks import gathered, this_rank

from forklora.collective import ranks


def test_alone(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert (this_rank(), ranks(), gathered("x")) == (0, 1, ["x"])


def test_the_launchers_number_counts_before_any_process_group_exists(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert this_rank() == 3
