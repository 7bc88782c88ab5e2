"""Names say type and depth, and a drawing against depth has a line for each type and a point for each layer."""

from forklora.recipes.depth import depth_chart, layer_depth, layer_type


def test_names_say_type_and_depth():
    assert layer_type("model.layers.12.self_attn.q_proj.weight") == "q_proj"
    assert layer_depth("model.layers.12.self_attn.q_proj.weight") == 12
    assert (layer_type("lm_head.weight"), layer_depth("lm_head.weight")) == ("lm_head", None)


def test_a_line_for_each_type_and_nothing_where_no_figure_is():
    figures = [(f"layers.{i}.{kind}", float(i)) for kind in ("q_proj", "up_proj") for i in (2, 0, 1)]
    drawn = depth_chart([*figures, ("layers.3.o_proj", None), ("lm_head", 9.0)], title="a figure")
    assert drawn.count('class="line"') == 2 and "q_proj" in drawn and "o_proj" not in drawn and "a figure" in drawn
    assert depth_chart([("layers.3.o_proj", None), ("lm_head", 9.0)], title="a figure") is None
