"""Megatron-core as a training backend, with explicit process groups and parameters that can give up their memory."""
