"""Rewards per token, and advantages from them: one file per family of estimators."""

from hybridengine.algorithms.advantages.gae import gae
from hybridengine.algorithms.advantages.group import dr_grpo, grpo, rloo
from hybridengine.algorithms.advantages.returns import discounted_returns, reinforce_plus_plus, remax
from hybridengine.algorithms.advantages.safe import safe_advantages
from hybridengine.algorithms.advantages.token_rewards import token_rewards

__all__ = [
    "discounted_returns",
    "dr_grpo",
    "gae",
    "grpo",
    "reinforce_plus_plus",
    "remax",
    "rloo",
    "safe_advantages",
    "token_rewards",
]
