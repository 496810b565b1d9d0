"""The engines that train and generate: Megatron-core and vLLM."""
