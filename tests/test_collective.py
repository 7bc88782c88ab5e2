"""What ranks do together: sums, one answer for all, and errors that reach everybody."""

import time

import pytest
import torch
from torch import distributed

from forklora.collective import all_or_none, from_first, rank, ranks, several, summed
from ranks import together


class Odd(ValueError):
    """An error with more than a text."""


def said(work):
    try:
        return work()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def refuse():
    raise ValueError("no such direction")


def failing(mine):
    def block():
        with all_or_none("counting"):
            if distributed.get_rank() == mine:
                raise ValueError("a miscount")
        return "done"

    return block


def counted():
    here = distributed.get_rank()
    return {
        "rank": [rank(), ranks(), several()],
        "sum": summed(10 ** (2 * here)),
        "first": from_first(lambda: {"rank": here, "bits": torch.full((2,), 0.1 + here).tolist()}),
        "refused": said(lambda: from_first(refuse)),
        "one fails": [said(failing(mine)) for mine in (0, 1, 2)],
    }


def stuck():
    while distributed.get_rank() == 0:
        time.sleep(1)


def broken():
    if distributed.get_rank() == 1:
        raise Odd("the second rank breaks")
    distributed.barrier()


def test_every_rank_gets_the_same_answer_and_the_same_error():
    pytest.importorskip("deepspeed")
    first, second = together(counted)
    assert (first["rank"], second["rank"]) == ([0, 2, True], [1, 2, True])
    assert first["sum"] == second["sum"] == 101
    assert first["first"] == second["first"] and first["first"]["rank"] == 0
    assert first["refused"] == second["refused"] == "ValueError: no such direction"
    other = "RuntimeError: counting failed on 1 other rank; see the error there."
    assert first["one fails"] == ["ValueError: a miscount", other, "done"]
    assert second["one fails"] == [other, "ValueError: a miscount", "done"]


def test_a_rank_that_breaks_ends_the_others_and_shows_its_traceback():
    pytest.importorskip("deepspeed")
    with pytest.raises(RuntimeError, match="rank 1:(.|\n)*in broken(.|\n)*the second rank breaks"):
        together(broken)


@pytest.mark.slow
def test_ranks_that_wait_for_ever_are_ended_and_say_where_they_stood():
    pytest.importorskip("deepspeed")
    with pytest.raises(TimeoutError, match="rank 0:(.|\n)*Timeout(.|\n)*in stuck"):
        together(stuck, timeout=20)


def test_on_one_process_there_is_nothing_to_do():
    assert (rank(), ranks(), several(), summed(7), from_first(lambda: 3)) == (0, 1, False, 7, 3)
    assert said(lambda: from_first(refuse)) == "ValueError: no such direction"
    with pytest.raises(KeyError), all_or_none("counting"):
        raise KeyError
