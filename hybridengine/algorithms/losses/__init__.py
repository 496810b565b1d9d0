"""Losses of the actor (`policy`, or `dpo` of pairs) and of critics (`value`).

`aggregation` says how losses of micro-batches become the gradient of a mini-batch.
"""
