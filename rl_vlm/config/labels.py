"""`preference.labels`: who labels, how, and which pairs. Defaults are RL-VLM-F's, with its option in brackets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from rl_vlm.config.section import Count, NonNegative, Positive, Section, Share

# Which pairs are asked about: RL-VLM-F's `feed_type` 0 to 5.
Rule = Literal["uniform", "disagreement", "entropy", "kcenter", "kcenter_disagreement", "kcenter_entropy"]


def names_no_cache(value: str | Path | None) -> bool:
    """None, "None", "null" and "" all mean: no label cache."""
    return value is None or str(value).strip().lower() in ("", "none", "null")


UNNAMED_MODEL = "default"  # of an endpoint


class TeacherSection(Section):
    """B-Pref's simulated teacher, which labels by the true reward (arXiv 2111.03026, section 4)."""

    beta: float = -1.0  # 0 or less: the higher return wins; above: Bradley-Terry with this scale.
    gamma: float = Field(1.0, gt=0, le=1)  # Discount over a segment; its last step counts in full.
    eps_mistake: Share = 0.0  # Share of labels that are flipped.
    # Pairs below this share of the average return are skipped; none where that is below 0, as in B-Pref.
    eps_skip: NonNegative = 0.0
    eps_equal: NonNegative = 0.0  # Pairs nearer than this share of the average return are equal; see eps_skip.


class EndpointSection(Section):
    """A labeller elsewhere, for `source: endpoint` (OpenAI's chat completions) and `source: generate`."""

    url: str = ""  # Empty with `generate`: SERVER_URL, or http://SERVER_HOST:SERVER_PORT/generate.
    model: str = UNNAMED_MODEL  # The model's name at the endpoint; a server that has one model is asked for that one.
    token_env: str = "RL_VLM_LABEL_TOKEN"  # The environment variable that holds the token, if any.
    timeout_s: Positive = 60.0  # How long one request may take.
    logprobs: bool = True  # Ask for the probabilities of the answers; false for endpoints without them.
    max_in_flight: Count | None = None  # Questions at once; null: all of a session. For a judge: of an env runner.


class LabelsSection(Section):
    # The served model, HTTP, the true reward (scripted), similarity of picture and text, or a label store alone.
    source: Literal["vlm", "endpoint", "generate", "scripted", "clip", "itm", "cache"] = "vlm"
    task: str | None = None  # Whose prompts are used; by default the environment's.
    goal: str | None = None  # The goal in words, such as `to open the drawer`; replaces the task's.
    description: str | None = None  # What the achieved goal looks like, for clip and itm.
    prompts: str | None = None  # A YAML file of own prompts.
    # A label store whose sessions are replayed first; None, null and '' mean none. [cached_label_path]
    cache: str | None = None
    steps: Literal[1, 2] = 2  # 1: the label at once. 2: describe, then summarise. [vlm]
    # How a single picture is scored (reward learn_from_score). number: the model writes a score. rating: it says one of
    # the words RATINGS (ERL-VLM, arXiv 2506.12822). success: whether the goal is reached (TOPReward, arXiv 2602.19313).
    # The last two are asked in one step and valued by the probabilities of the words, where these are known.
    scale: Literal["number", "rating", "success"] = "number"
    both_orders: bool = True  # Ask in both orders; a contradiction is -1. The original asks once.
    # The answer is 0, 1 or -1 by construction, and its probabilities are kept; reason: JSON with a reason before it.
    guided: bool | Literal["reason"] = True
    temperature: NonNegative = 0.0  # Of the labeller's answers.
    describe_tokens: Count = 512  # At most so many tokens of a description.
    answer_tokens: Count = 16  # At most so many tokens of a verdict.
    frames: Count = 1  # Pictures of a segment that are shown side by side. [vlm_label]
    deadline_s: Positive = 300.0  # How long one question may take, retries included.
    attempts: Count = 3  # At one question; those at which the endpoint is busy (429, 503, gone since) do not count.
    flip: bool = False  # Swap labels 0 and 1, as a control. [flip_vlm_label]
    coin_flips: bool = False  # Replace each decided label by a coin flip, as a control.
    rule: Rule = "uniform"  # Which pairs are asked about. [feed_type 0 to 5, in this order]
    large_batch: Count = 10  # Candidates per pair for rules other than uniform.
    # Undecided pairs are replaced by fresh ones up to this many times, within max_feedback; the original: 1.
    rounds: Count = 4
    teacher: TeacherSection = TeacherSection()
    endpoint: EndpointSection = EndpointSection()
    # For clip; for itm a BLIP-2 such as Salesforce/blip2-itm-vit-g.
    similarity_model: str = "openai/clip-vit-large-patch14-336"

    def problems(self) -> Iterator[str]:
        if self.source == "endpoint" and not self.endpoint.url:
            yield "preference.labels.endpoint.url is needed for source endpoint, such as http://host:8000/v1"
        if not names_no_cache(self.cache) and (self.flip or self.coin_flips):
            yield (
                "preference.labels.flip and coin_flips change what a labeller says, and the sessions of labels.cache "
                "are replayed as they were labelled: leave out one of the two"
            )
        if self.source == "cache" and names_no_cache(self.cache):
            yield "preference.labels.cache must name a label store for source cache"
