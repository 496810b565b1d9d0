"""Rewording of pydantic's and PyYAML's messages."""

from __future__ import annotations

import yaml


def rule(message: str) -> str:
    """Return pydantic's message as the rest of a sentence that begins "value must be"."""
    text = message.removeprefix("Input should be ").replace("a valid ", "a ")
    for theirs, ours in (
        ("greater than or equal to", "at least"),
        ("less than or equal to", "at most"),
        ("a integer", "an integer"),
        ("a array", "a list"),
        ("String should have at least 1 character", "a text that is not empty"),
        ("Tuple should have", "a list of"),
        (" after validation", ""),
    ):
        text = text.replace(theirs, ours)
    return text[0].lower() + text[1:]


def yaml_fault(error: BaseException) -> str:
    """Return the error of a YAML text, with line and column if they are known."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if "max_yaml_expanded_nodes" in str(error):  # OmegaConf's limit
        return "its anchors and aliases stand for too many values"
    if type(error) is ValueError:  # raised by int() only
        return "a number has thousands of digits"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem:
        mark = error.problem_mark or error.context_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}" if mark else error.problem
    return first_line(error)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if the message is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
