"""Renders a model's chat template as transformers does, but not for ever: a template is a program that came with the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import safe_range

_MAX_STEPS = 1_000_000  # items that loops go through: a template needs a few for each message
_MACRO_STEPS = 20  # what a call of a macro counts, because it takes so much longer
_COUNTED, _STEP = "rl_vlm_counted", "rl_vlm_step"


class ChatTemplate:
    """A compiled template whose loops and macros count their steps.

    Args:
        source: the Jinja template.
        variables: what every rendering gets, such as the tokenizer's special tokens.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        # Its sandbox with its filters and tags; the template is compiled again, with the counters in it.
        environment = _compile_jinja_template(source).environment
        tree = environment.parse(source)
        for loop in tree.find_all(nodes.For):
            loop.iter = _call(_COUNTED, loop.iter)
        for macro in tree.find_all((nodes.Macro, nodes.CallBlock)):
            macro.body.insert(0, nodes.ExprStmt(_call(_STEP, nodes.Const(_MACRO_STEPS))))
        tree.set_environment(environment)
        code = environment.compile(tree)
        self._template = Template.from_code(environment, code, environment.make_globals(None))
        self._variables = dict(variables)

    def render(self, conversation: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The conversation as text, generation prompt included. Raises jinja2's TemplateError, also for too many steps."""
        steps = 0

        def step(count: int) -> None:
            nonlocal steps
            steps += count
            if steps > _MAX_STEPS:
                raise SecurityError(f"it takes more than {_MAX_STEPS} steps")

        def counted(items: Iterable[Any]) -> list[Any]:
            found = list(items)
            step(len(found))
            return found

        def counted_range(*bounds: int) -> range:
            found: range = safe_range(*bounds)
            step(len(found))
            return found

        counters = {_COUNTED: counted, _STEP: step, "range": counted_range}
        settings = {"tools": None, "documents": None, "add_generation_prompt": True, **options}
        try:
            return self._template.render(messages=conversation, **{**self._variables, **settings, **counters})
        except RecursionError as error:
            raise SecurityError("it calls itself without end") from error


def _call(name: str, *arguments: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load"), [*arguments], [], None, None)
