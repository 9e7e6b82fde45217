"""`env.reward.judge`, `rubric`, `group_judge` and `progress`: what a model is asked about answers and episodes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from rl_vlm.config.labels import EndpointSection
from rl_vlm.config.section import Count, Positive, Section


class JudgeEndpoint(EndpointSection):
    """A judge elsewhere, which is not sent the labeller's token."""

    url: str = Field(pattern="^https?://")  # Such as http://host:8000/v1.
    token_env: str = "RL_VLM_JUDGE_TOKEN"  # The environment variable that holds the token, if any.


class JudgeSection(Section):
    """The part `judge`: a model says which of two texts describes the images better, asked in both orders."""

    # reference: the environment's `info[key]`. start: what the base model answers greedily to the same prompt.
    against: Literal["reference", "start"] = "reference"
    key: str = Field("reference", min_length=1)  # Where in the environment's `info` the reference is.
    # What is asked after the images; the quoted texts take the places of {first} and {second}.
    question: str = (
        "Caption 1: {first}\nCaption 2: {second}\nWhich caption describes the image better? Reply with 1 or 2 alone."
    )
    # Reward by the mean probability of the answer's choice where the judge gives it; false: 1, 0.5 or 0.
    probabilities: bool = True
    # The reply is 1 or 2 by construction; reason: JSON with a reason before it. false: the judge may reason first, and
    # its last line counts.
    guided: bool | Literal["reason"] = True
    max_chars: Count = 1000  # A longer answer loses unseen; a longer reference is cut off.
    start_tokens: Count = 256  # At most so many tokens of the base model's answer (against: start).
    answer_tokens: int = Field(16, ge=2)  # At most so many tokens of the judge's reply, beside a reason in JSON.
    deadline_s: Positive = 60.0  # How long one question may take, retries included.
    attempts: Count = 3  # At one question; those at which the endpoint is busy (429, 503, gone since) do not count.
    max_in_flight: Count = 256  # Questions of an env runner at once.
    # A judge with OpenAI's interface, its token in RL_VLM_JUDGE_TOKEN; null: the base weights of the run's replicas.
    endpoint: JudgeEndpoint | None = None

    @field_validator("question")
    @classmethod
    def _holds_both(cls, question: str) -> str:
        if question.count("{first}") != 1 or question.count("{second}") != 1:
            raise ValueError("env.reward.judge.question must hold {first} and {second} once each")
        return question


class PropositionSection(Section):
    """A statement about an answer, which the judge finds true or false."""

    text: str = Field(min_length=1)  # Such as `The answer names the colour of the largest ball.`
    weight: float = 1.0  # Negative: what is true costs.
    opposite: str = ""  # The same in reverse, asked too, so that a judge that always agrees decides nothing.


class RubricSection(Section):
    """The part `rubric`: a model judges each proposition by itself, and an answer earns the share that is true.

    It asks whom `judge` names, within its limits.
    """

    # Of all items; a text alone is short for `{text: ...}`.
    propositions: tuple[PropositionSection, ...] = ()
    key: str = Field("rubric", min_length=1)  # Where in the environment's `info` an item has more of them.
    sees: Literal["answer", "episode"] = "answer"  # The last answer, or all pictures and answers in turn.
    # What is asked after the images and the answer; the text of a proposition takes the place of {proposition}.
    question: str = "Statement: {proposition}\nIs it true of the answer and the image? Reply with yes or no alone."

    @field_validator("propositions", mode="before")
    @classmethod
    def _texts_alone(cls, given: Any) -> Any:
        return [{"text": one} if isinstance(one, str) else one for one in given]


class GroupJudgeSection(Section):
    """The part `group_judge`: a model chooses among all answers of a group at once, in several random orders, and each
    answer earns its rank. It asks whom `judge` names, within its limits."""

    orders: Count = 2  # In which the answers are shown, each in a question of its own.
    # What is asked after the images; the quoted answers, a letter before each, take the place of {answers}.
    question: str = "{answers}\nWhich answer is the best one for the image? Reply with its letter alone."


class ProgressSection(Section):
    """The part `progress`: how much likelier a model finds the task done at an episode's last picture than at its
    first (TOPReward, arXiv 2602.19313). It asks whom `judge` names, within its limits."""

    task: str = ""  # What is to be done; empty: the info's `task`.
    pictures: Count = 4  # Of the episode so far that are shown, the newest among them.
    # What is asked after the pictures; {task} is the task.
    question: str = "These pictures show an attempt in order. Task: {task}\nIs it done now? Reply True or False."
