"""Builds the feedback of a run from its configuration: the served model, the labeller, the reward model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_vlm.config import PreferenceConfig
from rl_vlm.labelling.store import LabelStore, label_cache
from rl_vlm.models.devices import driver_device
from rl_vlm.numerics import derive_seed
from rl_vlm.preference.feedback import Feedback, PairFeedback, ScoreFeedback, check_cache
from rl_vlm.preference.reward_model import RewardEnsemble, RewardTrainer

if TYPE_CHECKING:
    from rl_vlm.serving.service import PolicyService


class LabellerService:
    """The served model that labels, where the run asks for one. It starts in parallel with the rest of the run."""

    def __init__(self, config: PreferenceConfig, service: PolicyService | None = None) -> None:
        self._config = config
        self._service = service
        if service is None and config.preference.asks_served_model:
            from rl_vlm.serving.service import start_service

            self._service = start_service(config)

    def client_and_text(self) -> tuple[Any, Any]:
        """A client of the served model and its text side, once it is ready; (None, None) where nothing is served."""
        if self._service is None:
            return None, None
        from rl_vlm.models.loading import load_text_side
        from rl_vlm.serving.client import PolicyClient, homes

        self._service.wait_until_ready()
        serving = self._config.serving
        client = PolicyClient(
            self._service.run_id,
            deadline_s=serving.request_timeout_s,
            homes=homes(self._service.key, 0, 1, serving),
            key=self._service.key,
        )
        return client, load_text_side(self._service.model.folder, self._config.model.pixels)

    def close(self) -> None:
        """Stop serving. A second call does nothing."""
        service, self._service = self._service, None
        if service is not None:
            service.stop()


def build_feedback(
    config: PreferenceConfig, folder: Path, service: LabellerService, sizes: tuple[int, int]
) -> Feedback | None:
    """Labeller, reward model and label store of a run whose reward is learned; None for others.

    `sizes` are those of observation and action.
    """
    settings = config.preference
    if not settings.learns_reward:
        return None
    from rl_vlm.labelling.teachers import build_labeller

    cache, device = label_cache(settings.labels.cache), driver_device(config)
    if cache is not None:
        check_cache(cache, settings, sizes)
    labeller = None
    if settings.labels.source != "cache":
        client, text = service.client_and_text()
        labeller = build_labeller(
            settings.labels,
            env_id=config.env.id,
            seed=derive_seed(config.seed, 50) % 2**31,
            client=client,
            text=text,
            device=device,
        )
    shape = (settings.image_size, settings.image_size, 3) if settings.rewards_images else (sum(sizes),)
    seed = derive_seed(config.seed, 51) % 2**31
    trainer = RewardTrainer(RewardEnsemble(shape, settings.reward_model, seed, device=device), seed)
    if settings.reward_model.load:
        trainer.load(Path(settings.reward_model.load))
    if settings.reward == "learn_from_score":
        assert labeller is not None
        return ScoreFeedback(settings, trainer, labeller, folder)
    return PairFeedback(settings, trainer, labeller, folder, LabelStore(cache) if cache is not None else None)
