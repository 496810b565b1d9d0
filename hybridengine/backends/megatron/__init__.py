"""Megatron-core as a training backend, with explicit process groups and parameters whose memory can be released."""
