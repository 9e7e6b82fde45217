"""Stands in for `vagen.envs`: the base classes of its environments, which newer files import from here."""

from vagen.envs.gym_base_env import GymBaseEnv
from vagen.envs.gym_image_env import GymImageEnv

__all__ = ["GymBaseEnv", "GymImageEnv"]
