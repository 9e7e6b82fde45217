"""rl_vlm: reinforcement learning with vision-language models on Ray."""

__version__ = "0.1.0"

from rl_vlm.envs.registry import make, register

__all__ = ["__version__", "make", "register"]
