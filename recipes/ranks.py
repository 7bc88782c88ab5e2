"""What the processes that train one arm together tell each other; a single process is rank 0 of 1."""

import os
from typing import Any

from torch import distributed

from forklora.collective import ranks


def this_rank() -> int:
    """Place of this process among those that train together, as the launcher numbered them."""
    return int(os.environ.get("RANK", "0"))


def gathered(value: Any) -> list[Any]:  # noqa: ANN401 - anything that can be pickled
    """The value that each rank gave, in their order; every rank has to call this."""
    if ranks() == 1:
        return [value]
    values: list[Any] = [None] * ranks()
    distributed.all_gather_object(values, value)
    return values
