"""Prompt files, tokenizers, supervised demonstrations, and the demo's verifiable task with its reward."""
