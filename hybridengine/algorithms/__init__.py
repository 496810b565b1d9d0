"""Formulas of reinforcement-learning algorithms: pure functions of tensors, one concept per file.

    masking.py       valid entries of a [B, R] tensor, and means over them
    across.py        sums and maxima over all ranks that share a batch
    kl.py            per-token estimators of the KL divergence
    correction.py    weights for tokens that were sampled by a policy other than the trained one
    advantages.py    rewards per token, and advantages from them
    losses/          losses of actor and critic; aggregation.py combines micro-batches into one gradient

Shape suffixes: B sequences, R response tokens (the fixed width `max_response_tokens` of a run), P groups (prompts),
N pairs. [B, R] tensors are response-aligned: entry j belongs to response token j, so it comes from the model's output
one position earlier.
"""
