"""Advantage estimators: complete groups in, one advantage per sampled token out. Users register more.

Shapes: G trajectories in a group, K turns and T sampled tokens in a trajectory; arrays are by trajectory id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rl_vlm.config.learner import AlgorithmSection
from rl_vlm.registry import Registry
from rl_vlm.statistics import are_equal
from rl_vlm.types import RLVLMError, Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True)
class Rescaling:
    """A change of normalisation: a normalised value v becomes factor · v + shift and means the same return."""

    factor: float = 1.0
    shift: float = 0.0


@dataclass(frozen=True, slots=True)
class ReturnScale:
    """Running mean and mean square of returns, exponentially weighted and without the bias of the start."""

    mean_sum: float = 0.0
    square_sum: float = 0.0
    weight: float = 0.0

    _DECAY = 0.9  # per iteration
    _LEAST_STD = 1e-2

    @property
    def mean(self) -> float:
        return self.mean_sum / self.weight if self.weight else 0.0

    @property
    def std(self) -> float:
        """The standard deviation, bounded below so that equal returns do not blow up."""
        if not self.weight:
            return 1.0
        return max(max(self.square_sum / self.weight - self.mean**2, 0.0) ** 0.5, self._LEAST_STD)

    def observe(self, returns: np.ndarray) -> ReturnScale:
        """With the finite returns of another iteration."""
        seen = returns[np.isfinite(returns)].astype(np.float64)
        if not len(seen):
            return self
        keep, add = self._DECAY, 1 - self._DECAY
        mean, square = float(seen.mean()), float((seen**2).mean())
        before = (self.mean_sum, self.square_sum, self.weight)
        return ReturnScale(*(keep * old + add * new for old, new in zip(before, (mean, square, 1.0), strict=True)))

    def rescaling_to(self, new: ReturnScale) -> Rescaling:
        """The change of normalisation to a new scale. Without returns so far a value of 0 meant the mean return,
        whatever that is, and stays."""
        if not self.weight:
            return Rescaling()
        return Rescaling(self.std / new.std, (self.mean - new.mean) / new.std)


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    """1 - Var(R - V) / Var(R) over the tokens that have a return; 0 where all returns are equal."""
    known = np.isfinite(returns)
    if are_equal(returns[known]):
        return 0.0
    return 1.0 - float(np.var(returns[known] - values[known])) / float(np.var(returns[known]))


class EstimatorError(RLVLMError):
    """A registered estimator does not keep to the seam.

    Do: repair the estimator of your plugin.
    """


Arrays = dict[str, np.ndarray]  # by trajectory id


def turn_lengths(trajectory: Trajectory) -> np.ndarray:
    """Sampled tokens of each turn, int64 [K]."""
    return np.array([turn.stop - turn.start for turn in trajectory.turns], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Experience:
    """The whole batch, as estimators see it."""

    groups: Sequence[TrajectoryGroup]
    turn_rewards: Arrays  # float64 [K]
    token_rewards: Arrays = field(default_factory=dict)  # float32 [T], added to a token's reward; empty: no KL penalty
    values: Arrays = field(default_factory=dict)  # float32 [T], the critic's, of the state before each sampled token

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    def rewards_of_tokens(self, trajectory: Trajectory) -> np.ndarray:
        """The trajectory's `token_rewards`, float64 [T]; zeros without a penalty."""
        rewards = self.token_rewards.get(trajectory.trajectory_id)
        return np.zeros(trajectory.num_sampled) if rewards is None else rewards.astype(np.float64)

    @property
    def rewards(self) -> list[np.ndarray]:
        """The sum of a trajectory's rewards, those per token included: float64 [G] per group."""

        def total(one: Trajectory) -> float:
            return self.turn_rewards[one.trajectory_id].sum() + self.rewards_of_tokens(one).sum()

        return [np.array(list(map(total, group.trajectories))) for group in self.groups]


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the policy and the critic learn from."""

    advantages: Arrays  # float32 [T]
    returns: Arrays = field(default_factory=dict)  # float32 [T], NaN where nothing is learned; empty without a critic


AdvantageEstimator = Callable[[Experience, AlgorithmSection], Estimate]

ESTIMATORS: Registry[AdvantageEstimator] = Registry("algorithm.estimator")
register_estimator = ESTIMATORS.register


def group_advantages(
    rewards: np.ndarray, normalization: Literal["std", "none"] = "std", scale: float = 1.0, eps: float = 1e-6
) -> np.ndarray:
    """Advantages float64 [G] of one group: reward minus the group's mean.

    "std" divides by the unbiased standard deviation plus `eps` (GRPO: DeepSeekMath, arXiv 2402.03300, section 4.1);
    "none" does not (Dr. GRPO: arXiv 2503.20783).
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if are_equal(rewards):  # rounding noise divided by its own tiny deviation would look like a signal
        return np.zeros_like(rewards)
    centred = rewards - rewards.mean()
    if normalization == "std":
        centred = centred / (rewards.std(ddof=1) + eps)
    return np.asarray(centred * scale)


@register_estimator("group")
def group_mean(experience: Experience, settings: AlgorithmSection) -> Estimate:
    """GRPO: each trajectory is compared with the mean of its group; all of its tokens get the same advantage."""
    normalization, scale = settings.advantage_normalization, settings.advantage_scale
    return same_for_all_tokens(experience, [group_advantages(r, normalization, scale) for r in experience.rewards])


@register_estimator("rloo")
def leave_one_out(experience: Experience, settings: AlgorithmSection) -> Estimate:
    """RLOO (arXiv 2402.14740, section 2.2): each trajectory is compared with the mean of the *others* of its group."""
    values = []
    for group_rewards in experience.rewards:
        size = len(group_rewards)
        # r - mean of the others = (r - mean of all) · G / (G - 1)
        centred = group_advantages(group_rewards, "none", settings.advantage_scale)
        values.append(centred * size / (size - 1) if size > 1 else centred)
    return same_for_all_tokens(experience, values)


@register_estimator("reinforce_pp")
def whole_batch(experience: Experience, settings: AlgorithmSection) -> Estimate:
    """REINFORCE++ (arXiv 2501.03262): the undiscounted return from each token on, normalised over all tokens of the
    batch. A turn is rewarded at its last token."""
    returns: Arrays = {}
    for trajectory in experience.trajectories:
        rewards = experience.rewards_of_tokens(trajectory)
        rewards[_last_tokens(trajectory)] += experience.turn_rewards[trajectory.trajectory_id]
        returns[trajectory.trajectory_id] = rewards[::-1].cumsum()[::-1]
    return Estimate(_normalized(returns, settings.advantage_scale))


@register_estimator("reinforce_pp_baseline")
def group_mean_over_whole_batch(experience: Experience, settings: AlgorithmSection) -> Estimate:
    """REINFORCE++ with a baseline (arXiv 2501.03262): minus the group's mean, then normalised over all tokens."""
    centred = same_for_all_tokens(experience, [group_advantages(rewards, "none") for rewards in experience.rewards])
    return Estimate(_normalized(centred.advantages, settings.advantage_scale))


@register_estimator("gigpo")
def same_state(experience: Experience, settings: AlgorithmSection) -> Estimate:
    """GiGPO (arXiv 2505.10978): the advantage of the trajectory in its group plus, with the weight `gigpo_step_weight`,
    that of a turn's discounted return among all turns of the group that began in its state. An empty state is alone."""

    def relative(compared: np.ndarray) -> np.ndarray:
        return group_advantages(compared, settings.advantage_normalization, settings.advantage_scale)

    advantages: Arrays = {}
    for group, totals in zip(experience.groups, experience.rewards, strict=True):
        rewards = []
        for trajectory in group.trajectories:  # with what each turn's tokens add
            parts = np.split(experience.rewards_of_tokens(trajectory), _last_tokens(trajectory) + 1)[:-1]
            rewards.append(experience.turn_rewards[trajectory.trajectory_id] + np.array([part.sum() for part in parts]))
        returns = np.concatenate([gae(turns, np.zeros(len(turns)), settings.gigpo_gamma, 1.0) for turns in rewards])
        states = np.array([turn.state_id for trajectory in group.trajectories for turn in trajectory.turns])
        step = np.zeros(len(returns))
        for state in set(states.tolist()) - {""}:
            step[states == state] = relative(returns[states == state])
        per_turn = np.repeat(relative(totals), list(map(len, rewards))) + settings.gigpo_step_weight * step
        lengths = np.concatenate([turn_lengths(trajectory) for trajectory in group.trajectories])
        ends = np.cumsum([trajectory.num_sampled for trajectory in group.trajectories])[:-1]
        parts = np.split(np.repeat(per_turn, lengths).astype(np.float32), ends)
        advantages |= {one.trajectory_id: part for one, part in zip(group.trajectories, parts, strict=True)}
    return Estimate(advantages)


def _last_tokens(trajectory: Trajectory) -> np.ndarray:
    """Each turn's last token among the sampled ones, int64 [K]."""
    return np.cumsum(turn_lengths(trajectory)) - 1


def _normalized(values: Arrays, scale: float, *, ddof: int = 0, eps: float = 1e-6) -> Arrays:
    """(value - mean) / (standard deviation + eps) · scale over all tokens, float32; zeros for equal values."""
    every = flat(values)
    if are_equal(every):
        return {name: np.zeros(len(tokens), dtype=np.float32) for name, tokens in values.items()}
    mean, scale = every.mean(), scale / (every.std(ddof=ddof) + eps)
    return {name: ((tokens - mean) * scale).astype(np.float32) for name, tokens in values.items()}


def flat(values: Mapping[str, np.ndarray]) -> np.ndarray:
    """All tokens of the batch in one array, float64."""
    return np.concatenate([*values.values(), np.zeros(0)])


def same_for_all_tokens(experience: Experience, values: Sequence[np.ndarray]) -> Estimate:
    """One number per trajectory, `values` float64 [G] per group, given to each of its tokens."""
    every = np.concatenate([*values, np.zeros(0)])
    return Estimate(
        {
            trajectory.trajectory_id: np.full(trajectory.num_sampled, value, dtype=np.float32)
            for trajectory, value in zip(experience.trajectories, every, strict=True)
        }
    )


# GAE: generalised advantage estimation (arXiv 1506.02438) over tokens, over turns, or over tokens inside turns. An
# episode ends with its last turn, also where a limit cut it off: no value is added for what might have come.

Advantages = tuple[np.ndarray, np.ndarray]  # advantages and returns, float64 [T]; returns NaN where nothing is learned


@register_estimator("gae")
def generalized_advantages(experience: Experience, settings: AlgorithmSection) -> Estimate:
    """Advantages and returns of every sampled token from the critic's values; see `gae_level` for what a step is.

    `advantage_normalization: std` is over all tokens of the batch, as in PPO's implementations.
    """
    if not experience.values:
        raise EstimatorError("algorithm.estimator gae needs a critic: set algorithm.name to ppo.")
    advantages, returns = Arrays(), Arrays()
    for trajectory in experience.trajectories:
        name = trajectory.trajectory_id
        advantages[name] = returns[name] = np.zeros(0, dtype=np.float32)
        if trajectory.num_sampled:
            advantages[name], targets = trajectory_gae(
                experience.turn_rewards[name],
                experience.rewards_of_tokens(trajectory),
                experience.values[name].astype(np.float64),
                turn_lengths(trajectory),
                settings,
            )
            returns[name] = targets.astype(np.float32)
    if settings.advantage_normalization == "std":
        return Estimate(_normalized(advantages, settings.advantage_scale, ddof=1, eps=1e-8), returns)
    scale = settings.advantage_scale
    return Estimate({name: (tokens * scale).astype(np.float32) for name, tokens in advantages.items()}, returns)


def trajectory_gae(
    turn_rewards: np.ndarray,
    token_rewards: np.ndarray,
    values: np.ndarray,
    lengths: np.ndarray,
    settings: AlgorithmSection,
) -> Advantages:
    """One trajectory: float64 turn_rewards [K], token_rewards [T], values [T]; lengths int64 [K] of its turns, none 0.

    "token": the turn's reward comes with its last token; turns follow each other without a break.
    "turn": a turn is one action with one value, that of the state before its first token; all of its tokens share an
    advantage. "bilevel" (VAGEN, arXiv 2510.16907): turns first, with the values before their last tokens; then inside
    each turn GAE over tokens from the turn's advantage at its last token backwards.
    """
    gamma, lam = settings.gamma, settings.gae_lambda
    turn_gamma, turn_lam = settings.turn_gamma, settings.turn_lambda
    last = np.cumsum(lengths) - 1
    if settings.gae_level == "token":
        rewards = token_rewards.copy()
        rewards[last] += turn_rewards
        advantages = gae(rewards, values, gamma, lam)
        return advantages, advantages + values
    if settings.gae_level == "turn":
        first = last - lengths + 1
        rewards = turn_rewards + np.add.reduceat(token_rewards, first)
        of_turns = gae(rewards, values[first], turn_gamma, turn_lam)
        returns = np.full(len(values), np.nan)
        returns[first] = of_turns + values[first]
        return np.repeat(of_turns, lengths), returns
    of_turns = gae(turn_rewards + token_rewards[last], values[last], turn_gamma, turn_lam)
    advantages = np.empty(len(values))
    for advantage, end, length in zip(of_turns, last, lengths, strict=True):
        inside = slice(end - length + 1, end + 1)
        rewards = token_rewards[inside].copy()
        rewards[-1] = advantage + values[end]
        advantages[inside] = gae(rewards, values[inside], gamma, lam)
    return advantages, advantages + values


def gae(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """Advantages float64 [T] of one episode that ends after its last reward.

    A_t = δ_t + γλ A_{t+1} with δ_t = r_t + γ V_{t+1} - V_t (equations 11 and 16 of the paper).
    """
    deltas = rewards - values
    deltas[:-1] += gamma * values[1:]
    advantages = np.empty(len(deltas))
    following = 0.0
    for step in range(len(deltas) - 1, -1, -1):
        following = deltas[step] + gamma * lam * following
        advantages[step] = following
    return advantages
