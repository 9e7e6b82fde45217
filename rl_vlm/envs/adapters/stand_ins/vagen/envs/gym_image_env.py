"""VAGEN's environments whose observations may hold images."""

from vagen.envs.gym_base_env import GymBaseEnv


class GymImageEnv(GymBaseEnv):
    """An observation is {"obs_str": text, "multi_modal_input": {"<image>": [PIL images]}}, the second where it has images."""
