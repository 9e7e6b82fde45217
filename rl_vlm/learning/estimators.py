"""Advantage estimators: complete groups in, one advantage per sampled token out. Users register more.

Shapes: G trajectories in a group, K turns and T sampled tokens in a trajectory. Per-token arrays of all trajectories
are lists: `values[group][trajectory]`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from rl_vlm.config.learner import AlgorithmSection
from rl_vlm.numerics import are_equal
from rl_vlm.registry import Registry
from rl_vlm.types import RLVLMError, Trajectory, TrajectoryGroup


def step_returns(rewards: np.ndarray, gamma: float) -> np.ndarray:
    """The discounted sum of this and the later turns' rewards, float64 [K] from [K]."""
    returns = np.zeros(len(rewards))
    following = 0.0
    for turn in reversed(range(len(rewards))):
        following = rewards[turn] + gamma * following
        returns[turn] = following
    return returns


def gigpo_advantages(
    rewards: Sequence[np.ndarray],
    states: Sequence[Sequence[str]],
    relative: Callable[[np.ndarray], np.ndarray],
    *,
    gamma: float,
    step_weight: float,
) -> list[np.ndarray]:
    """The advantage of each turn of a group's trajectories, float64 [K] each.

    The episode-relative advantage of the trajectory's whole reward, plus `step_weight` times the
    step-relative advantage of the turn's discounted return among all turns of the group with the same state.

    Args:
        rewards: per trajectory, the rewards [K] of its turns.
        states: per trajectory, the state before each turn; an empty one is unknown and like no other.
        relative: advantages [n] of n rewards that are compared with each other; 0 for a single one.
        gamma: discount per turn.
        step_weight: ω.
    """
    episode = relative(np.array([turns.sum() for turns in rewards]))
    returns = [step_returns(turns, gamma) for turns in rewards]
    alike: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for number, names in enumerate(states):
        for turn, name in enumerate(names):
            if name:
                alike[name].append((number, turn))
    step = [np.zeros(len(turns)) for turns in rewards]
    for places in alike.values():
        compared = relative(np.array([returns[number][turn] for number, turn in places]))
        for (number, turn), advantage in zip(places, compared, strict=True):
            step[number][turn] = advantage
    return [whole + step_weight * turns for whole, turns in zip(episode, step, strict=True)]


@dataclass(frozen=True, slots=True)
class Rescaling:
    """A change of normalisation: a normalised value v becomes factor · v + shift and means the same return."""

    factor: float = 1.0
    shift: float = 0.0


@dataclass(frozen=True, slots=True)
class ReturnScale:
    """Running mean and mean square of returns, exponentially weighted and without the bias of the start.

    Part of the driver's checkpoint. With `weight` 0 nothing has been seen: mean 0, standard deviation 1.
    """

    mean_sum: float = 0.0
    square_sum: float = 0.0
    weight: float = 0.0

    _DECAY = 0.9  # per iteration
    _LEAST_STD = 1e-2

    @property
    def mean(self) -> float:
        """The mean return."""
        return self.mean_sum / self.weight if self.weight else 0.0

    @property
    def std(self) -> float:
        """The standard deviation, bounded below so that equal returns do not blow up."""
        if not self.weight:
            return 1.0
        return max(max(self.square_sum / self.weight - self.mean**2, 0.0) ** 0.5, self._LEAST_STD)

    def observe(self, returns: np.ndarray) -> ReturnScale:
        """With the finite ones of another iteration's returns."""
        seen = returns[np.isfinite(returns)].astype(np.float64)
        if not len(seen):
            return self
        keep = self._DECAY
        return replace(
            self,
            mean_sum=keep * self.mean_sum + (1 - keep) * float(seen.mean()),
            square_sum=keep * self.square_sum + (1 - keep) * float((seen**2).mean()),
            weight=keep * self.weight + (1 - keep),
        )

    def rescaling_to(self, new: ReturnScale) -> Rescaling:
        """How values that are normalised by this scale are normalised by a new one.

        A critic that has seen no return says 0, which is to mean the mean return whatever that is.
        """
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
    """A registered estimator does not keep to the seam."""


PerToken = list[list[np.ndarray]]


def flat(values: PerToken) -> np.ndarray:
    """All tokens of the batch in one array."""
    return np.concatenate([tokens for group in values for tokens in group] or [np.zeros(0)])


def turn_lengths(trajectory: Trajectory) -> np.ndarray:
    """Sampled tokens of each turn, int64 [K]."""
    return np.array([turn.stop - turn.start for turn in trajectory.turns], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Experience:
    """The whole batch, as estimators see it.

    turn_rewards: float64 [K] per trajectory; the environment's, unless a control has permuted them. token_rewards:
    float32 [T], what is added to the reward of a token (a KL penalty), or None. values: float32 [T], the critic's value
    of the state before each sampled token, or None without a critic.
    """

    groups: Sequence[TrajectoryGroup]
    turn_rewards: list[list[np.ndarray]]
    token_rewards: PerToken | None = None
    values: PerToken | None = None

    @property
    def rewards(self) -> list[np.ndarray]:
        """The sum of a trajectory's rewards, those per token included: float64 [G] per group."""
        totals = [np.array([turns.sum() for turns in group]) for group in self.turn_rewards]
        if self.token_rewards is not None:
            for total, group in zip(totals, self.token_rewards, strict=True):
                total += [tokens.sum(dtype=np.float64) for tokens in group]
        return totals


@dataclass(frozen=True, slots=True)
class Estimate:
    """In the order of the groups and trajectories that were given.

    advantages: float32 [T]. returns: float32 [T], what the critic learns to predict before each token, NaN where
    nothing; None without a critic. Filled in by `plan.estimate_advantages`, not by estimators: means float64 [G] per
    group, the mean advantage over a trajectory's tokens; learns bool [G], whether any is not zero.
    """

    advantages: PerToken
    returns: PerToken | None = None
    means: list[np.ndarray] = field(default_factory=list)
    learns: list[np.ndarray] = field(default_factory=list)

    def summary(self, lengths: list[list[int]], name: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Per group: the trajectories' mean advantages float64 [G], 0 without a sampled token, and bool [G]: any not
        zero.

        Raises EstimatorError where a user's estimator gave something else than finite numbers, one per sampled token;
        `lengths` holds the numbers of sampled tokens.
        """
        if [[np.shape(tokens) for tokens in group] for group in self.advantages] != [
            [(length,) for length in group] for group in lengths
        ]:
            raise EstimatorError(
                f"algorithm.estimator {name}: it must give one array per trajectory, one number per sampled token."
            )
        # One array for the whole batch: numpy's calls cost more than its work on thousands of short ones.
        flat_lengths = np.array([length for group in lengths for length in group], dtype=np.int64)
        means, learns = np.zeros(len(flat_lengths)), np.zeros(len(flat_lengths), dtype=bool)
        sampled = flat_lengths > 0
        if sampled.any():
            tokens = flat(self.advantages).astype(np.float64)
            if not np.isfinite(tokens).all():
                raise EstimatorError(f"algorithm.estimator {name}: it gave a number that is not finite.")
            starts = np.cumsum(flat_lengths[sampled]) - flat_lengths[sampled]
            means[sampled] = np.add.reduceat(tokens, starts) / flat_lengths[sampled]
            learns[sampled] = np.logical_or.reduceat(tokens != 0, starts)
        ends = np.cumsum([len(group) for group in lengths])[:-1]
        return np.split(means, ends), np.split(learns, ends)


AdvantageEstimator = Callable[[Experience, AlgorithmSection], Estimate]

ESTIMATORS: Registry[AdvantageEstimator] = Registry("algorithm.estimator")
register_estimator = ESTIMATORS.register


def group_advantages(
    rewards: np.ndarray, normalization: Literal["std", "none"] = "std", scale: float = 1.0, eps: float = 1e-6
) -> np.ndarray:
    """Advantages float64 [G] of one group: reward minus the group's mean.

    "std" divides by the unbiased standard deviation plus `eps` (GRPO: DeepSeekMath, arXiv 2402.03300, section 4.1);
    "none" does not (Dr. GRPO: arXiv 2503.20783). Rewards that are equal but for rounding give exactly zero, and so does
    a group of one.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if are_equal(rewards):
        # The floating-point mean of equal numbers need not be that number, and rounding divided by its deviation would
        # be a signal.
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
    """REINFORCE++ (arXiv 2501.03262): the return of each token, normalised over all tokens of the batch.

    The undiscounted sum of the rewards from the token on. A turn is paid at its last token; a KL penalty is part of
    `token_rewards`. No group's mean is subtracted.
    """
    returns: PerToken = []
    for number, group in enumerate(experience.groups):
        returns.append([])
        for place, trajectory in enumerate(group.trajectories):
            rewards = np.zeros(trajectory.num_sampled)
            if experience.token_rewards is not None:
                rewards += experience.token_rewards[number][place]
            rewards[_last_tokens(trajectory)] += experience.turn_rewards[number][place]
            returns[-1].append(rewards[::-1].cumsum()[::-1])
    return Estimate(_normalized(returns, settings.advantage_scale))


@register_estimator("reinforce_pp_baseline")
def group_mean_over_whole_batch(experience: Experience, settings: AlgorithmSection) -> Estimate:
    """REINFORCE++ with a baseline (arXiv 2501.03262): minus the group's mean, then normalised over all tokens of the
    batch."""
    centred = same_for_all_tokens(experience, [group_advantages(rewards, "none") for rewards in experience.rewards])
    return Estimate(_normalized(centred.advantages, settings.advantage_scale))


@register_estimator("gigpo")
def same_state(experience: Experience, settings: AlgorithmSection) -> Estimate:
    """GiGPO (arXiv 2505.10978): beside whole trajectories, turns that began in the same state are compared."""
    advantages: PerToken = []
    for group, rewards in zip(experience.groups, _rewards_per_turn(experience), strict=True):
        per_turn = gigpo_advantages(
            rewards,
            [[turn.state_id for turn in trajectory.turns] for trajectory in group.trajectories],
            lambda compared: group_advantages(compared, settings.advantage_normalization, settings.advantage_scale),
            gamma=settings.gigpo_gamma,
            step_weight=settings.gigpo_step_weight,
        )
        advantages.append(
            [
                np.repeat(turns, turn_lengths(trajectory)).astype(np.float32)
                for turns, trajectory in zip(per_turn, group.trajectories, strict=True)
            ]
        )
    return Estimate(advantages)


def _rewards_per_turn(experience: Experience) -> list[list[np.ndarray]]:
    """The turns' rewards with those of their tokens, float64 [K] per trajectory."""
    if experience.token_rewards is None:
        return experience.turn_rewards
    return [
        [
            turns
            + np.array([part.sum(dtype=np.float64) for part in np.split(tokens, _last_tokens(trajectory) + 1)[:-1]])
            for turns, tokens, trajectory in zip(rewards, per_token, group.trajectories, strict=True)
        ]
        for group, rewards, per_token in zip(
            experience.groups, experience.turn_rewards, experience.token_rewards, strict=True
        )
    ]


def _last_tokens(trajectory: Trajectory) -> np.ndarray:
    """The place of each turn's last token among the sampled ones, int64 [K]."""
    return np.cumsum(turn_lengths(trajectory)) - 1


def _normalized(values: PerToken, scale: float, eps: float = 1e-6) -> PerToken:
    """(value - mean) / (standard deviation + eps) · scale over all tokens, float32.

    Values that are equal but for rounding give exactly zero.
    """
    every = flat(values).astype(np.float64)
    if are_equal(every):
        return [[np.zeros(len(tokens), dtype=np.float32) for tokens in group] for group in values]
    mean, deviation = every.mean(), every.std()
    return [[((tokens - mean) / (deviation + eps) * scale).astype(np.float32) for tokens in group] for group in values]


def same_for_all_tokens(experience: Experience, values: Sequence[np.ndarray]) -> Estimate:
    """One number per trajectory, `values` float64 [G] per group, given to each of its tokens."""
    return Estimate(
        [
            [
                np.full(trajectory.num_sampled, value, dtype=np.float32)
                for trajectory, value in zip(group.trajectories, group_values, strict=True)
            ]
            for group, group_values in zip(experience.groups, values, strict=True)
        ]
    )


# GAE: generalised advantage estimation (arXiv 1506.02438) over tokens, over turns, or over tokens inside turns.
#
# An episode ends with its last turn, also where a limit cut it off: no value is added for what might have come.

Advantages = tuple[np.ndarray, np.ndarray]  # advantages and returns, float64 [T]; returns NaN where nothing is learned


@register_estimator("gae")
def generalized_advantages(experience: Experience, settings: AlgorithmSection) -> Estimate:
    """Advantages and returns of every sampled token from the critic's values; see `gae_level` for what a step is.

    `advantage_normalization: std` makes mean 0 and standard deviation 1 over all tokens of the batch, as PPO's
    implementations do.
    """
    if experience.values is None:
        raise EstimatorError("algorithm.estimator gae needs a critic: set algorithm.name to ppo.")
    advantages, returns = [], []
    for g, group in enumerate(experience.groups):
        group_advantages, group_returns = [], []
        for k, trajectory in enumerate(group.trajectories):
            lengths = turn_lengths(trajectory)
            values = experience.values[g][k].astype(np.float64)
            token_rewards = np.zeros(len(values))
            if experience.token_rewards is not None:
                token_rewards += experience.token_rewards[g][k]
            if len(values):
                found = trajectory_gae(experience.turn_rewards[g][k], token_rewards, values, lengths, settings)
            else:
                found = (np.zeros(0), np.zeros(0))
            group_advantages.append(found[0])
            group_returns.append(found[1].astype(np.float32))
        advantages.append(group_advantages)
        returns.append(group_returns)
    mean, scale = 0.0, settings.advantage_scale
    tokens = flat(advantages)
    if settings.advantage_normalization == "std" and len(tokens) > 1:
        mean, scale = tokens.mean(), 0.0 if are_equal(tokens) else scale / (tokens.std(ddof=1) + 1e-8)
    return Estimate(
        [[((tokens - mean) * scale).astype(np.float32) for tokens in group] for group in advantages], returns
    )


def trajectory_gae(
    turn_rewards: np.ndarray,
    token_rewards: np.ndarray,
    values: np.ndarray,
    lengths: np.ndarray,
    settings: AlgorithmSection,
) -> Advantages:
    """One trajectory: float64 turn_rewards [K], token_rewards [T], values [T]; lengths int64 [K] of its turns, none 0.

    "token": the turn's reward is paid with its last token; turns follow each other without a break.
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
