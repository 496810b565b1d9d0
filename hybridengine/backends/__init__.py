"""Training and generation backends: Megatron-core and vLLM."""
