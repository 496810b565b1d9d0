"""A Megatron 3D-parallel HybridEngine for RL post-training of large language models."""

__version__ = "0.1.0"
