"""Loading of a `RunConfig` from a YAML file and `key=value` overrides, with all problems reported in one error.

An override without a value, a key or value that a section does not allow, and values that conflict are found together; a
rule between values is skipped only where one of the values is itself reported.
"""

from __future__ import annotations

import difflib
import io
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, cast, get_args, get_origin

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from hybridengine.config.algorithm import (
    DEFAULT,
    Algorithm,
    algorithm_class,
    served_algorithm,
)
from hybridengine.config.checks import find_conflicts
from hybridengine.config.run_config import RunConfig
from hybridengine.errors import ConfigError, UnreadableError, raise_all, shown
from hybridengine.files import read_text
from hybridengine.redaction import HIDDEN, is_secret

INVALID = (OmegaConfBaseException, yaml.YAMLError, OSError, TypeError, ValueError, IndexError, RecursionError)
"""Errors of YAML texts and of their values."""
BRACKETED = re.compile(r"\[[^][,\s]*\][^][,\s]+")
"""Texts such as [fd77::1]:6379, whose brackets YAML takes for a list, after which nothing may follow."""
Problem = tuple[str, str]
"""(dotted key, message)."""


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    dry_run: bool = False,
    placed: bool = True,
    serves: bool = False,
) -> RunConfig:
    """Return the configuration described by a file and `key=value` overrides; the last of equal keys wins.

    A file with the key `base` overrides that other file, whose path is relative to its own folder.

    Args:
        dry_run: accept that the checkpoint and the data are not on this machine, provided `model.hf_config` gives
            the shapes.
        placed: include rules about ranks, pools and sizes.
        serves: return the configuration of a server: with its roles alone, and without what only a run needs.

    Raises:
        ConfigError: lists every problem.
    """
    tree = _read_tree(Path(path))
    names = [text.partition("=")[2] for text in overrides if text.startswith("algorithm.name=")]
    _change_algorithm(tree, names[-1] if names else None)
    problems = list(_apply_overrides(tree, overrides))
    try:
        values = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except (OmegaConfBaseException, RecursionError) as error:
        key = f" at {full}" if (full := getattr(error, "full_key", None)) else ""
        problems.append(("", f"{path}{key}: {yaml_fault(error)}; write the value itself"))
        raise_all(text for _, text in problems)
        raise AssertionError("unreachable") from error
    assert isinstance(values, dict), "the root of a configuration is a mapping"
    values = {str(key): value for key, value in values.items()}
    for name, field in RunConfig.model_fields.items():
        # An empty section has its defaults.
        if values.get(name, ...) is None and not isinstance(field.default, str | None):
            del values[name]
    run = values.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("name", Path(path).stem)
    try:
        json.dumps(values, default=str, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # undecodable bytes of a file name or argument
        raise ConfigError(f"{error.object[-60:]!a} is not UTF-8 text; write other characters") from None
    config, found = _validate(values)
    problems += found
    if config is not None and serves:
        has_engines = any("generation" in pool.roles for pool in config.cluster.pools.values())
        served = served_algorithm(has_engines=has_engines, has_reference=config.serve.reference)
        config = config.model_copy(update={"algorithm": served})
    in_question = {key for key, _ in problems}
    conflicts = (
        [] if config is None else find_conflicts(config, dry_run=dry_run, placed=placed, serves=serves)
    )
    problems += [
        ("", text) for text, keys in conflicts if not any(_touches(key, in_question) for key in keys)
    ]
    raise_all(message for _, message in problems)
    assert config is not None, "without a problem there is a configuration"
    return config


def _read_tree(path: Path, above: tuple[Path, ...] = ()) -> DictConfig:
    """Return a file merged over its base, recursively."""
    tree = _read_yaml(path)
    if path.resolve() in above:
        chain = " -> ".join(str(file.name) for file in (*above, path))
        raise ConfigError(f"{path} is its own base ({chain}); leave one `base` out")
    base = tree.pop("base", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base={base} must be the name of a file; write one, or leave it out")
    below = _read_tree(path.parent / base, (*above, path.resolve()))
    section = tree.get("algorithm")
    _change_algorithm(below, section.get("name") if isinstance(section, DictConfig) else None)
    try:
        return cast(DictConfig, OmegaConf.merge(below, tree))
    except (OmegaConfBaseException, TypeError) as error:
        raise ConfigError(
            f"{path} cannot be merged with its base {base} ({first_line(error)}); write a list where the base has a list,"
            " and a section where it has a section"
        ) from None


def _change_algorithm(tree: DictConfig, name: Any) -> None:
    """Drop options of the current algorithm that `name`, set by a file or override on top, does not have."""
    section = tree.get("algorithm")
    if name is None or not isinstance(section, DictConfig):
        return
    here = _class_or_base(section.get("name", DEFAULT)).model_fields
    for key in [key for key in section if key in here and key not in _class_or_base(name).model_fields]:
        del section[key]


def _read_yaml(path: Path) -> DictConfig:
    text = ""
    try:
        text = read_text(path)
        yaml.compose(text, Loader=yaml.SafeLoader)
        tree = OmegaConf.load(io.StringIO(text))
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist; name a run configuration such as configs/arithmetic.yaml"
        ) from None
    except UnreadableError as error:
        raise ConfigError(f"{error}; name a YAML file") from None
    except INVALID as error:
        mark = getattr(error, "problem_mark", None)
        line = text.splitlines()[mark.line : mark.line + 1] if mark else []
        found = BRACKETED.search("".join(line))
        remedy = f"write {json.dumps(found[0])}, in quotation marks" if found else "correct the file"
        raise ConfigError(f"{path}: not valid YAML ({yaml_fault(error)}); {remedy}") from None
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{path} holds a list, not sections; start it with a section such as 'run:'")
    return tree


def _apply_overrides(tree: DictConfig, overrides: Iterable[str]) -> Iterator[Problem]:
    """Write each `key=value` into the tree; yield the problems."""
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")) or key != key.strip():
            yield "", f"override {text!r} is not key=value; write for instance actor.parallel=2-2-1"
            continue
        try:
            yaml.compose(value, Loader=yaml.SafeLoader)
            parsed = OmegaConf.from_dotlist([f"value={value}"])["value"]
            OmegaConf.update(tree, key, parsed, merge=True, force_add=True)
        except INVALID as error:
            override = shown(f"{key}={HIDDEN if is_secret(key) else value}")
            fault, remedy = yaml_fault(error), "write key=value with a plain value"
            if BRACKETED.search(value) and not is_secret(key):
                quoted = BRACKETED.sub(lambda found: json.dumps(found[0]), value)
                fault = "YAML takes brackets for a list, after which nothing may follow"
                remedy = f"write {key}={shlex.quote(quoted)}"
            yield key, f"override {override} cannot be applied ({fault}); {remedy}"


def _validate(values: dict[str, Any]) -> tuple[RunConfig | None, list[Problem]]:
    """Return the configuration without its invalid entries, and their problems."""
    problems: list[Problem] = []
    while True:
        section = values.get("algorithm")
        kind = _class_or_base(section.get("name", DEFAULT) if isinstance(section, dict) else DEFAULT)
        try:
            text = json.dumps(values, default=str)
            return RunConfig.model_validate_json(text, strict=True), problems
        except ValidationError as error:
            removed = False
            items, earlier = error.errors(), [key for key, _ in problems]
            for item in items:
                if any(other["loc"][: len(item["loc"])] == item["loc"] != other["loc"] for other in items):
                    continue  # a list without its invalid entries may be too short, which is not a problem of its own
                location, problem = _describe(item, kind)
                if not _touches(_dotted(location), earlier):  # else it is missing because it was removed
                    problems += problem
                removed |= _remove(values, location)
            if not removed:
                return None, problems


def _class_or_base(name: Any) -> type[Algorithm]:
    """Return the class of the algorithm called `name`, or the base class if there is none."""
    try:
        return algorithm_class(name)
    except (TypeError, ValueError):
        return Algorithm


def _describe(item: Any, algorithm: type[Algorithm]) -> tuple[list[str | int], list[Problem]]:
    """Return the location of a pydantic error and its problems, also for the keys that it suggests."""
    location = list(item["loc"])
    key = _dotted(location)
    kind, context = item["type"], item.get("ctx", {})
    value = HIDDEN if any(is_secret(str(part)) for part in location) else item["input"]
    known = known_fields(algorithm)
    if kind == "extra_forbidden":
        above = _key_in_table(location[:-1], known)
        there = [name for parent, _, name in (key.rpartition(".") for key in known) if parent == above]
        near = _suggestions(location, there, known)
        hint = f"did you mean {' or '.join(near)}?" if near else f"keys here are {', '.join(there)}"
        message = f"unknown key {key}; {hint}"
        return location, [(key, message), *((other, message) for other in near)]
    if kind == "value_error":
        message = f"{key}: {context['error']}"
    elif kind in ("model_type", "model_attributes_type", "dict_type"):
        message = f"{key}={shown(value)} must be a section with keys of its own; write them beneath {key}"
    elif kind == "missing":
        message = f"{key} is missing; {_remedy(known[_key_in_table(location, known)])}"
    elif kind == "literal_error":
        near = difflib.get_close_matches(str(value), context["expected"].split("'"), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "choose one of these"
        message = f"{key}={shown(value)} must be {context['expected']}; {hint}"
    else:
        message = f"{key}={shown(value)} must be {rule(item['msg'])}; {_remedy(known[_key_in_table(location, known)])}"
    return location, [(key, message)]


def _remedy(field: FieldInfo) -> str:
    """Return how to restore the default, and the meaning of the key."""
    meaning = f" ({field.description.rstrip('.')})" if field.description else ""
    if field.is_required():
        return f"give it a value{meaning}"
    default = json.dumps(field.get_default(), default=str)
    return f"correct it, or leave it out for the default {default}{meaning}"


def _remove(values: Any, location: Sequence[str | int]) -> bool:
    """Remove the entry at `location`, or the list that holds it, from `values`; return True if it existed."""
    for index, part in enumerate(location):
        if not isinstance(values, dict) or part not in values:
            return False
        inner = values[part]
        if index == len(location) - 1 or not isinstance(inner, dict):
            del values[part]
            return True
        values = inner
    return False


def _suggestions(location: Sequence[str | int], there: list[str], known: Iterable[str]) -> list[str]:
    """Return dotted keys similar to an unknown one: siblings, or else keys of the same name elsewhere."""
    name = str(location[-1])
    if near := difflib.get_close_matches(name, there, n=1, cutoff=0.7):
        return [_dotted([*location[:-1], near[0]])]
    leaves = {key.rpartition(".")[2] for key in known}
    near = [name] if name in leaves else difflib.get_close_matches(name, leaves, n=1, cutoff=0.75)
    return [key for key in known if key.rpartition(".")[2] in near][:3]


def known_fields(
    algorithm: type[Algorithm] = Algorithm, model: type[BaseModel] = RunConfig, prefix: str = ""
) -> dict[str, FieldInfo]:
    """Return every section and field with this `algorithm` by dotted key; NAME stands for a user-defined name."""
    found: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        found[prefix + name] = field
        beneath = f"{prefix}{name}.{'NAME.' if get_origin(field.annotation) is dict else ''}"
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found |= known_fields(algorithm, algorithm if kind is Algorithm else kind, beneath)
    return found


def _key_in_table(location: Iterable[str | int], known: Iterable[str]) -> str:
    """Return the key of `known_fields` at a location, or of the list or mapping that contains it."""
    keys, found = [f"{key}." for key in known], ""
    for part in takewhile(lambda part: isinstance(part, str), location):
        ways = (f"{found}NAME.", f"{found}{part}.")
        beneath = next((way for way in ways if any(key.startswith(way) for key in keys)), None)
        if beneath is None:
            break
        found = beneath
    return found.removesuffix(".")


def _touches(key: str, others: Iterable[str]) -> bool:
    """True if `key` is one of `others`, lies beneath one, or contains one."""
    return any(
        key == other or key.startswith(other + ".") or other.startswith((key + ".", key + "["))
        for other in others
        if other
    )


def _dotted(location: Iterable[str | int]) -> str:
    """Return a location as a dotted key: run.name, cluster.ranks_per_node[0]."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    return "".join(parts).removeprefix(".")


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
