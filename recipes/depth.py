"""Reads kind and depth off the names of a model's layers, and draws figures of layers against depth."""

from collections.abc import Iterable

from forklora.recipes import plots
from markupsafe import Markup

_SIZE = (430.0, 280.0)
BY_DEPTH = "One line for each type of layer, from the first block to the last."


def layer_type(name: str) -> str:
    """The kind of a weight: the last word of its name but ``weight`` or ``bias``, such as q_proj or embed_tokens."""
    return next(word for word in reversed(name.split(".")) if word not in ("weight", "bias"))


def layer_depth(name: str) -> int | None:
    """The number of the block that a weight belongs to, or None outside of them."""
    return next((int(word) for word in name.split(".") if word.isdecimal()), None)


def depth_chart(figures: Iterable[tuple[str, float | None]], *, title: str) -> Markup | None:
    """A line for each type of layer; None where no figure of a layer in a block exists.

    Args:
        figures: name of a layer or a weight, and its figure.
        title: what is drawn.
    """
    lines: dict[str, list[tuple[float, float]]] = {}
    for name, value in figures:
        depth = layer_depth(name)
        if depth is not None and value is not None:
            lines.setdefault(layer_type(name), []).append((float(depth), value))
    if not lines:
        return None
    series = [plots.Series(kind, hue, sorted(points)) for hue, (kind, points) in enumerate(lines.items())]
    said = f"{title} against the layer's depth, one line per type of layer"
    return plots.line_chart(series, titles=("block", title), description=said, size=_SIZE)
