"""Rewards per token, and advantages from them: one file per estimator."""

from hybridengine.algorithms.advantages.gae import gae
from hybridengine.algorithms.advantages.token_rewards import token_rewards

__all__ = ["gae", "token_rewards"]
