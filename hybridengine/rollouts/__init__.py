"""Responses of asynchronous runs: the queue between engines and trainer, and the engines that fill it."""
