"""Prompt files, tokenizers, supervised demonstrations, and the verifiable task of the demo with its reward."""
