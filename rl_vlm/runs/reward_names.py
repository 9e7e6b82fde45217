"""Looks for misspelt parts of the reward before a run starts: an environment's own parts show in an episode alone."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Sequence

from rl_vlm.envs.base import VisionEnv
from rl_vlm.envs.errors import check_step, reward_parts
from rl_vlm.rollout.scoring import OWN, REWARD_PARTS
from rl_vlm.types import UserInputError

logger = logging.getLogger(__name__)

_NEARLY = 0.85  # of difflib: "formt" and "format" are .91 alike


def check_reward_names(names: Sequence[str], env: VisionEnv, max_turns: int) -> None:
    """Names that are no registered part must be given by the episode that was opened, which is answered by nothing until it ends.

    Raises UserInputError for one that is not. An episode that is cut off may not have come to its parts: there only what is spelt nearly as
    a registered part is refused. One that raises says nothing.
    """
    unknown = set(names) - {OWN, *REWARD_PARTS.names()}
    given: set[str] = set()
    if not unknown:
        return
    for _ in range(max_turns):
        try:
            _, _, terminated, truncated, info = check_step(env.step(""))
            given |= {name for name, _ in reward_parts(info)}
        except Exception as error:  # whatever the environment raises; the run counts it
            logger.debug("the parts of the reward are not known: %r", error)
            return
        if terminated or truncated:
            break
    else:
        terminated = False
    missing = sorted(
        name
        for name in unknown - given
        if terminated or difflib.get_close_matches(name, REWARD_PARTS.names(), 1, _NEARLY)
    )
    if missing:
        known = sorted(given | {OWN, *REWARD_PARTS.names()})
        near = difflib.get_close_matches(missing[0], known, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UserInputError(
            f"env.reward.weights names {', '.join(missing)}, and the parts here are {', '.join(known)}: correct the name, or let the "
            f"environment give it in info['reward_parts'].{hint}"
        )
