"""The texts of a labeller's questions: templates with `{goal}`, and `{answer}` in the second of two steps."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import StringConstraints, model_validator

from rl_vlm.config.section import Section

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


class Templates(Section):
    """The texts of all queries. Comparisons show `first`, image, `second`, image and then a question."""

    first: str = "Compare the following two images.\nImage 1:\n"
    second: str = "\nImage 2:\n"
    describe: str = (
        "\n1. What is shown in Image 1?\n2. What is shown in Image 2?\n"
        "3. The goal is {goal}. Does one of the images come closer to the goal than the other, and in what way?\n"
        "Answer in two sentences."
    )
    summarise: str = (
        "Two images were compared. The goal is {goal}. This was said about Image 1, about Image 2 and about the "
        "difference between them in terms of the goal:\n{answer}\n\n"
        "In which image is the goal better achieved, according to this text? Reply with a single line: 0 for Image 1, "
        "1 for Image 2, or -1 if there is no difference or the text is unsure."
    )
    decide: str = (
        "\nThe goal is {goal}. In which image is the goal better achieved? Reply with a single line: 0 for Image 1, "
        "1 for Image 2, or -1 if there is no difference or it cannot be told."
    )
    score_image: str = "Look at the following image:\n"
    score_describe: str = (
        "\n1. What is shown in the image?\n"
        "2. The goal is {goal}. On a scale from 0 to 1, where 1 means that the goal is achieved, which score does the "
        "image deserve?\nAnswer in two sentences."
    )
    score_summarise: str = (
        "An image was scored from 0 to 1, where 1 means that the goal is achieved. The goal is {goal}. This was said:\n"
        "{answer}\n\nReply with a single line: the score that the text gives, or -1 if it is unsure."
    )
    score_decide: str = (
        "\nThe goal is {goal}. On a scale from 0 to 1, where 1 means that the goal is achieved, which score does the "
        "image deserve? Reply with a single line: the score, or -1 if it cannot be told."
    )

    rate_decide: str = (
        "\nThe goal is {goal}. How well does the image show that the goal is achieved? Reply with one word: terrible, "
        "poor, fair, good or excellent."
    )
    success_decide: str = (
        "\nThe goal is {goal}. The image shows that the goal is achieved. Is this statement True or not? Reply True or "
        "False."
    )

    @model_validator(mode="after")
    def _placeholders(self) -> Templates:
        for name, field in type(self).model_fields.items():
            wanted, given = (set(_PLACEHOLDER.findall(text)) for text in (str(field.default), getattr(self, name)))
            if given != wanted:
                shown = " and ".join(f"{{{part}}}" for part in sorted(wanted)) or "no placeholder"
                raise ValueError(f"the template `{name}` must hold {shown}, and holds {sorted(given) or 'none'}")
        return self


class TaskPrompts(Section):
    """One task: `goal` completes "The goal is ...", `description` says what the achieved goal looks like."""

    goal: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
    description: Annotated[str, StringConstraints(strip_whitespace=True)] = ""
    templates: Templates = Templates()

    def fill(self, template: str, answer: str = "") -> str:
        parts = {"goal": self.goal, "answer": answer}
        # Not str.format: answers may hold braces.
        return _PLACEHOLDER.sub(lambda match: parts[match[1]], template)
