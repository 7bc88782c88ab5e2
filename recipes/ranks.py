"""What the processes that train one arm together tell each other; a single process is rank 0 of 1."""

import os
from typing import Any

from torch import distributed


def this_rank() -> int:
    """Place of this process among those that train together, as the launcher numbered them."""
    return int(os.environ.get("RANK", "0"))


def all_ranks() -> int:
    """How many processes train together."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def gathered(value: Any) -> list[Any]:  # noqa: ANN401 - anything that can be pickled
    """The value that each rank gave, in their order; every rank has to call this."""
    if all_ranks() == 1:
        return [value]
    values: list[Any] = [None] * all_ranks()
    distributed.all_gather_object(values, value)
    return values
