"""`env.reward`: the reward as a weighted sum of named parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, field_validator

from rl_vlm.config.labels import EndpointSection
from rl_vlm.config.section import Section

JUDGE_TOKEN = "RL_VLM_JUDGE_TOKEN"


class JudgeSection(Section):
    """The part `judge`: a model is shown the episode's images and two texts, in both orders, and says which describes them better."""

    against: Literal["reference", "start"] = Field(
        "reference",
        description="reference: the text that the environment gives in `info[key]`. start: what the base model itself answers, "
        "greedily, to the same prompt.",
    )
    key: str = Field("reference", min_length=1, description="Where in the environment's `info` the reference is.")
    question: str = Field(
        "Caption 1: {first}\nCaption 2: {second}\nWhich caption describes the image better? Reply with 1 or 2 alone.",
        description="What is asked after the images; the quoted texts take the places of {first} and {second}.",
    )
    probabilities: bool = Field(
        True,
        description="Pay the mean probability of the answer's choice where the judge gives it; false: 1, 0.5 or 0.",
    )
    guided: bool = Field(
        True,
        description="The reply is 1 or 2 by construction. false: the judge may reason first; its last line counts.",
    )
    max_chars: int = Field(1000, ge=1, description="A longer answer loses unseen; a longer reference is cut off.")
    start_tokens: int = Field(
        256, ge=1, description="At most so many tokens of the base model's answer (against: start)."
    )
    answer_tokens: int = Field(16, ge=2, description="At most so many tokens of the judge's reply.")
    deadline_s: float = Field(60.0, gt=0, description="How long one question may take, retries included.")
    attempts: int = Field(
        3, ge=1, description="At one question; those at which the endpoint is busy (429, 503, gone since) do not count."
    )
    max_in_flight: int = Field(256, ge=1, description="Questions of an env runner at once.")
    endpoint: EndpointSection | None = Field(
        None,
        description="A judge elsewhere that speaks OpenAI's chat completions, its token in RL_VLM_JUDGE_TOKEN; null: the base "
        "weights of the replicas that serve the policy.",
    )

    @field_validator("question")
    @classmethod
    def _holds_both(cls, question: str) -> str:
        if question.count("{first}") != 1 or question.count("{second}") != 1:
            raise ValueError("env.reward.judge.question must hold {first} and {second} once each")
        return question

    @field_validator("endpoint", mode="before")
    @classmethod
    def _own_token(cls, value: Any) -> Any:
        # The labeller's token is not sent to a judge.
        return {"token_env": JUDGE_TOKEN, **value} if isinstance(value, dict) else value

    @field_validator("endpoint")
    @classmethod
    def _has_address(cls, endpoint: EndpointSection | None) -> EndpointSection | None:
        if endpoint is not None and not endpoint.url.startswith(("http://", "https://")):
            raise ValueError("env.reward.judge.endpoint.url is needed, such as http://host:8000/v1")
        return endpoint


class RewardSection(Section):
    """The reward as a weighted sum of named parts: the environment's own, built-in ones, and those that plugins register."""

    weights: dict[str, float] = Field(
        default_factory=dict,
        description="Part -> weight; `env` is the environment's own reward. Empty: the environment's own reward as it is.",
    )
    length_budget: int = Field(
        0, ge=0, description="Sampled tokens of an episode that the part `length` does not count."
    )
    judge: JudgeSection = JudgeSection()

    def notes(self, key: str) -> Iterator[str]:
        """A sentence on each setting of a part that has no weight; `key` names this section."""
        for name, part in (("length_budget", "length"), ("judge", "judge")):
            if part not in self.weights and any(self.changed(name)):
                yield f"{key}.{name} has no effect without a weight of the part {part} in {key}.weights."
