"""MiniWoB-v0 without its browser: how actions are read, and where points are on the page."""

from __future__ import annotations

import pytest

from rl_vlm.zoo.miniwob.actions import Action, Coordinates, Frame, NoActionError, parse_action

FRAME = Frame(160, 210, 2, "pixels")


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        ("click(40, 120)", Action("click", ((20, 60),))),
        ("I see it.\nThe button is below: Click([40, 120]).", Action("click", ((20, 60),))),
        ("click(x=40,y=30.0)", Action("click", ((20, 15),))),
        ("`double_click(0, 0)`", Action("double_click", ((0, 0),))),
        ("move(320, 420)", Action("move", ((159, 209),))),  # the corner is the last pixel's
        ("drag(2, 4, 20, 40)", Action("drag", ((1, 2), (10, 20)))),
        ("scroll(2, 4, Down)", Action("scroll", ((1, 2),), "down")),
        ("scroll(2, 4, 'up')", Action("scroll", ((1, 2),), "up")),
        ('type("hello world")', Action("type", text="hello world")),
        (r'type("a \"b\", (c) é\n")', Action("type", text='a "b", (c) é\n')),
        ("type('it is')", Action("type", text="it is")),
        ("type(content=plain)", Action("type", text="plain")),
        ('type("click(1, 2)")', Action("type", text="click(1, 2)")),
        ('click(1, 2), then type("x")', Action("type", text="x")),  # the last one is the action
        ("key(Enter)", Action("key", text="Enter")),
        ('key("ctrl+a")', Action("key", text="ctrl+a")),
        ("key(shift+Tab)", Action("key", text="shift+Tab")),
        ("wait", Action("wait")),
        ("I am done.", Action("done")),
        ("done()", Action("done")),
    ],
)
def test_an_action_is_what_the_last_line_ends_with(answer: str, action: Action) -> None:
    assert parse_action(answer, FRAME) == action


@pytest.mark.parametrize(
    "answer",
    [
        "", "\n", "nothing", "click", "click()", "click(1)", "click(1, 2, 3)", "click(a, b)", "click(1, 2) is what I do", "click(1, 2)\nor not",
        "drag(1, 2)", "scroll(1, 2)", "scroll(1, 2, left)", "scroll(down)", "click(321, 0)", "click(0, -1)", "type()", 'type("a" "b)', r'type("\x")',
        'type("' + "a" * 501 + '")', "key()", "key(F5)", "key(ctrl+w)", "key(ctrl+t)", "key(alt+left)", "key(hyper+a)", "key(ctrl)", "undone", "misclick(1, 2)",
    ],
)  # fmt: skip
def test_another_answer_names_no_action(answer: str) -> None:
    with pytest.raises(NoActionError):
        parse_action(answer, FRAME)


@pytest.mark.parametrize(
    ("coordinates", "inside", "outside"),
    [
        ("pixels", ("160, 210", "320, 420"), "321, 0"),
        ("unit", ("0.5, 0.5", "1, 1"), "1.01, 0"),
        ("thousandths", ("500, 500", "1000, 1000"), "0, 1001"),
    ],
)
def test_points_are_counted_in_three_ways(coordinates: Coordinates, inside: tuple[str, str], outside: str) -> None:
    frame = Frame(160, 210, 2, coordinates)
    assert parse_action(f"click({inside[0]})", frame).points == ((80, 105),)
    assert parse_action(f"click({inside[1]})", frame).points == ((159, 209),)
    with pytest.raises(NoActionError, match="outside"):
        parse_action(f"click({outside})", frame)
