"""Losses of the actor (`policy`, or `dpo` for pairs) and of critics (`value`).

`aggregation` combines the losses of micro-batches into the gradient of a mini-batch.
"""
