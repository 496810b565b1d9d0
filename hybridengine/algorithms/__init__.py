"""Formulas of reinforcement-learning algorithms: pure functions of tensors, one concept per file.

Shape suffixes: B sequences, R response tokens (the fixed width `max_response_tokens` of a run), P groups (prompts),
N pairs. [B, R] tensors are response-aligned: entry j belongs to response token j, so it comes from the model's output
one position earlier.
"""
