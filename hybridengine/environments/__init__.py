"""Environments of libraries by name: prompts, the other side of a conversation, and the reward.

A file per kind: `reasoning_gym.py`, `gymnasium.py` and `verifiers.py` each have a class with the methods of
`environment.Environment`. `episode.py` plays them; `files.py` writes their prompts before a run's ranks start.
"""
