"""YAML file and `key=value` overrides -> `RunConfig`, with every problem in one error.

Problems come in three kinds, and the later ones are found even where there are earlier ones: an override without a
value, a key or value that the sections do not allow, and values that do not fit together. A rule between values is
left out only where one of these values is itself in question.
"""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Union, cast, get_args, get_origin

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from hybridengine.config.algorithm import ALGORITHMS, DEFAULT, Algorithm, algorithm_class
from hybridengine.config.checks import find_conflicts
from hybridengine.config.run_config import RunConfig
from hybridengine.config.wording import first_line, rule, yaml_fault
from hybridengine.errors import ConfigError, UnreadableError, raise_all, shown
from hybridengine.reading import check_regular
from hybridengine.redaction import remember_secrets

MAX_NESTING = 100
"""Levels of sections and lists in a configuration."""
_OPENING = (
    yaml.BlockMappingStartToken,
    yaml.BlockSequenceStartToken,
    yaml.FlowMappingStartToken,
    yaml.FlowSequenceStartToken,
)
_CLOSING = (yaml.BlockEndToken, yaml.FlowMappingEndToken, yaml.FlowSequenceEndToken)

Problem = tuple[str, str]
"""Dotted key in question, message."""


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, dry_run: bool = False, placed: bool = True
) -> RunConfig:
    """Configuration of the run that `path` and the `key=value` overrides describe; the last of equal keys counts.

    A file with the key `base` says what is different from that other file, which is named from its own folder.

    Args:
        dry_run: accept that the checkpoint and the data are not on this machine, as long as `model.hf_config` gives
            the shapes.
        placed: whether ranks, pools and sizes count; without them, rules that concern them are left out.

    Raises:
        ConfigError: everything that is wrong, in one list.
    """
    tree = _read_tree(Path(path))
    names = [text.partition("=")[2] for text in overrides if text.startswith("algorithm.name=")]
    _change_algorithm(tree, names[-1] if names else None)
    problems = list(_apply_overrides(tree, overrides))
    try:
        values = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise_all([*(text for _, text in problems), _unresolved(path, error)])
        raise AssertionError("unreachable") from error
    assert isinstance(values, dict), "the root of a configuration is a mapping"
    values = {str(key): value for key, value in values.items()}
    remember_secrets(values)
    _drop_empty_sections(values)
    run = values.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("name", Path(path).stem)
    raise_all(
        f"{ascii(key)[1:-1]}: {text!a} is not UTF-8 text; write other characters (run.name is the name of the file"
        " where it is left out)"
        for key, text in _broken_texts(values)
    )

    config, found = _validate(values)
    problems += found
    in_question = {key for key, _ in problems}
    conflicts = find_conflicts(config, dry_run=dry_run, placed=placed) if config is not None else []
    messages = [message for _, message in problems]
    messages += [text for text, keys in conflicts if not any(_touches(key, in_question) for key in keys)]
    raise_all(messages)
    assert config is not None, "without a problem there is a configuration"
    return config


def _read_tree(path: Path, above: tuple[Path, ...] = ()) -> DictConfig:
    """A file upon its base, and that upon its own."""
    tree = _read_yaml(path)
    if path.resolve() in above:
        chain = " -> ".join(str(file.name) for file in (*above, path))
        raise ConfigError(f"{path} is its own base ({chain}); leave one `base` out")
    base = tree.pop("base", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        found = shown(OmegaConf.to_container(base) if OmegaConf.is_config(base) else base)
        raise ConfigError(f"{path}: base={found} must be the name of a file; write one, or leave it out")
    below = _read_tree(path.parent / base, (*above, path.resolve()))
    _change_algorithm(below, _named_algorithm(tree))
    raise_all(
        f"{path}: {key} is {'a list' if isinstance(found, list) else 'a section'}, and in its base {base} it is"
        f" {'a section' if isinstance(found, list) else 'a list'}; write one like the base's"
        for key, found in _clashes(OmegaConf.to_container(below), OmegaConf.to_container(tree))
    )
    return cast(DictConfig, OmegaConf.merge(below, tree))


def _clashes(below: Any, above: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of each list in `above` where `below` has a section, and the other way round."""
    if isinstance(below, dict) and isinstance(above, dict):
        for name in sorted(above.keys() & below.keys(), key=str):
            yield from _clashes(below[name], above[name], f"{key}.{name}".removeprefix("."))
    elif isinstance(below, dict | list) and isinstance(above, dict | list) and type(below) is not type(above):
        yield key, above


def _named_algorithm(tree: DictConfig) -> Any:
    section = tree.get("algorithm")
    return section.get("name") if isinstance(section, DictConfig) else None


def _change_algorithm(tree: DictConfig, name: Any) -> None:
    """Drop the options of the algorithm of `tree` that another one, which a file or override upon it names, lacks."""
    section = tree.get("algorithm")
    if name is None or not isinstance(section, DictConfig):
        return
    here = _class_or_base(section.get("name", DEFAULT)).model_fields
    for key in [key for key in section if key in here and key not in _class_or_base(name).model_fields]:
        del section[key]


def _read_yaml(path: Path) -> DictConfig:
    try:
        check_regular(path)
        _check_nesting(path.read_text(encoding="utf-8"))
        tree = OmegaConf.load(path)
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist; name a run configuration such as configs/arithmetic.yaml"
        ) from None
    except UnreadableError as error:
        raise ConfigError(f"{error}; name a YAML file") from None
    except (PermissionError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); name a YAML file") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: not valid YAML ({error.problem}); correct this line") from None
    except (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML ({yaml_fault(error)}); correct the file") from None
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{path} holds a list, not sections; start it with a section such as 'run:'")
    return tree


def _check_nesting(text: str) -> None:
    """Check how deep a YAML text is nested: building 40,000 levels would end the process.

    Raises:
        RecursionError: deeper than any configuration.
        yaml.YAMLError: it is not YAML.
    """
    depth = 0
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        depth += isinstance(token, _OPENING) - isinstance(token, _CLOSING)
        if depth > MAX_NESTING:
            raise RecursionError("nested too deeply")


def _apply_overrides(tree: DictConfig, overrides: Iterable[str]) -> Iterator[Problem]:
    """Write each `key=value` into the tree."""
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")) or key != key.strip():
            yield "", f"override {text!r} is not key=value; write for instance actor.parallel=2-2-1"
            continue
        try:
            if key.count(".") > MAX_NESTING:
                raise RecursionError("nested too deeply")
            _check_nesting(value)
            parsed = OmegaConf.from_dotlist([f"value={value}"])["value"]
            if isinstance(OmegaConf.select(tree, key), DictConfig) and not isinstance(
                parsed, DictConfig | None
            ):
                yield key, f"override {text!r} would replace the whole section {key}; write {key}.KEY=value"
                continue
            OmegaConf.update(tree, key, parsed, merge=True, force_add=True)
        except (
            OmegaConfBaseException,
            yaml.YAMLError,
            TypeError,
            ValueError,
            IndexError,
            RecursionError,
        ) as error:
            yield (
                key,
                f"override {_cut(text)!r} cannot be applied ({first_line(error)}); write key=value with a plain value",
            )


def _cut(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:197]}..."


def _unresolved(path: str | Path, error: OmegaConfBaseException) -> str:
    """Message for a `???` or a `${...}` that has no value."""
    key = f" at {error.full_key}" if error.full_key else ""
    return f"{path}{key}: {first_line(error)}; write the value itself"


def _drop_empty_sections(values: dict[str, Any]) -> None:
    """`critic:` with nothing beneath means the section's defaults."""
    for name, field in RunConfig.model_fields.items():
        is_section = not isinstance(field.default, str)
        if is_section and name in values and values[name] is None and not _is_optional(field.annotation):
            del values[name]


def _broken_texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Dotted key and text of each key and value that UTF-8 cannot write: bytes of a file name or of an argument."""
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            beneath = f"{key}.{name}".removeprefix(".")
            yield from _broken_texts(str(name), beneath)
            yield from _broken_texts(inner, beneath)
    elif isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            yield key, value


def _validate(values: dict[str, Any]) -> tuple[RunConfig | None, list[Problem]]:
    """Configuration without the entries that are wrong, and what is wrong with them."""
    problems: list[Problem] = []
    while True:
        section = values.get("algorithm")
        kind = _class_or_base(section.get("name", DEFAULT) if isinstance(section, dict) else DEFAULT)
        try:
            text = json.dumps(values, default=str)
            return RunConfig.model_validate_json(text, strict=True), problems
        except ValidationError as error:
            removed = False
            items = error.errors()
            for item in items:
                if any(_is_beneath(other["loc"], item["loc"]) for other in items):
                    continue  # a list without its wrong entries may be too short, which says nothing
                location, problem = _describe(item, kind)
                problems += problem
                # What else an algorithm reads that is not known, nobody can say.
                removed |= _remove(values, location[:1] if location == ["algorithm", "name"] else location)
            if not removed:
                return None, problems


def _is_beneath(location: tuple[str | int, ...], other: tuple[str | int, ...]) -> bool:
    return len(location) > len(other) and location[: len(other)] == other


def _class_or_base(name: Any) -> type[Algorithm]:
    """Class of the algorithm called `name`; the base class where there is none."""
    try:
        return algorithm_class(name)
    except (TypeError, ValueError):
        return Algorithm


def _describe(item: Any, algorithm: type[Algorithm]) -> tuple[list[str | int], list[Problem]]:
    """Return the location of a pydantic error and its problems: its key first, then the key that was probably meant.

    Args:
        algorithm: class of the section `algorithm`.
    """
    location = list(item["loc"])
    key = _dotted(location)
    value, kind, context = item["input"], item["type"], item.get("ctx", {})
    if kind == "extra_forbidden":
        near, there = _suggestions(location, algorithm), _siblings(location, algorithm)
        readers = _readers(str(location[1])) if location[0] == "algorithm" and len(location) == 2 else []
        if readers:
            hint = f"it is an option of {', '.join(readers)}; the chosen algorithm has {', '.join(there)}"
        elif near:
            hint = f"did you mean {' or '.join(near)}?"
        else:
            hint = f"keys here are {', '.join(there)}"
        message = f"unknown key {key}; {hint}"
        return location, [(key, message), *((other, message) for other in near)]
    if kind == "value_error":
        message = f"{key}: {context['error']}"
    elif kind in ("model_type", "model_attributes_type", "dict_type"):
        message = f"{key}={shown(value)} must be a section with keys of its own; write them beneath {key}"
    elif kind == "missing":
        message = f"{key} is missing; {_remedy(location, algorithm)}"
    elif kind == "literal_error":
        near = difflib.get_close_matches(
            str(value), [str(choice) for choice in context["expected"].split("'")], n=1
        )
        message = f"{key}={shown(value)} must be {context['expected']}" + (
            f"; did you mean {near[0]!r}?" if near else "; choose one of these"
        )
    else:
        message = f"{key}={shown(value)} must be {rule(item['msg'])}; {_remedy(location, algorithm)}"
    return location, [(key, message)]


def _remedy(location: Sequence[str | int], algorithm: type[Algorithm]) -> str:
    """The way back to the default, and what the key means."""
    field = None
    for fields, part in _fields_along(location, algorithm):
        field = fields[part]
    assert field is not None, "a value that is wrong has a key"
    meaning = f" (it is: {_begun_small(field.description.rstrip('.'))})" if field.description else ""
    if field.is_required():
        return f"give it a value{meaning}"
    default = json.dumps(field.get_default(), default=str)
    return f"correct it, or leave it out for the default {default}{meaning}"


def _begun_small(text: str) -> str:
    """`text` with a small first letter, unless it begins with an abbreviation."""
    return text if text[1:2].isupper() else text[0].lower() + text[1:]


def _remove(values: Any, location: Sequence[str | int]) -> bool:
    """Take the entry at `location`, or the list that holds it, out of `values`; whether there was one."""
    for index, part in enumerate(location):
        if not isinstance(values, dict) or part not in values:
            return False
        inner = values[part]
        if index == len(location) - 1 or not isinstance(inner, dict):
            del values[part]
            return True
        values = inner
    return False


def _readers(option: str) -> list[str]:
    """This project's algorithms that have an option."""
    return [name for name in ALGORITHMS if option in algorithm_class(name).model_fields]


def _suggestions(location: Sequence[str | int], algorithm: type[Algorithm]) -> list[str]:
    """Existing dotted keys close to an unknown one: siblings first, then the same name in another section."""
    parent, name = _dotted(location[:-1]), str(location[-1])
    near = difflib.get_close_matches(name, _siblings(location, algorithm), n=1, cutoff=0.7)
    if near:
        return [f"{parent}.{near[0]}" if parent else near[0]]
    keys = list(all_keys())
    leaves = {key.rpartition(".")[2] for key in keys}
    near = [name] if name in leaves else difflib.get_close_matches(name, leaves, n=1, cutoff=0.75)
    return [key for key in keys if key.rpartition(".")[2] in near][:3]


def _siblings(location: Sequence[str | int], algorithm: type[Algorithm]) -> list[str]:
    *_, (fields, _) = _fields_along(location, algorithm)
    return list(fields)


def _fields_along(
    location: Sequence[str | int], algorithm: type[Algorithm]
) -> Iterator[tuple[dict[str, FieldInfo], str]]:
    """Fields of each section on the way to `location`, and the key among them; names of named sections are no keys."""
    model: type[BaseModel] = RunConfig
    is_name = False
    for part in location:
        if isinstance(part, int):
            return
        if is_name:
            is_name = False
            continue
        yield model.model_fields, part
        field = model.model_fields.get(part)
        if field is not None:
            model, is_name = _section_of(field.annotation) or model, _is_mapping(field.annotation)
            model = algorithm if model is Algorithm else model


def all_keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Dotted keys of every section and field that a configuration may have."""
    for name, field in model.model_fields.items():
        yield prefix + name
        section = _section_of(field.annotation)
        if section is Algorithm:
            options = (all_keys(algorithm_class(known), f"{prefix}{name}.") for known in ALGORITHMS)
            yield from dict.fromkeys(key for keys in options for key in keys)
        elif section is not None:
            yield from all_keys(section, f"{prefix}{name}.{'NAME.' if _is_mapping(field.annotation) else ''}")


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field's type is, or None for a plain value."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _is_mapping(annotation: Any) -> bool:
    """Whether a field holds sections by name."""
    return get_origin(annotation) is dict


def _is_optional(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType) and type(None) in get_args(annotation)


def _touches(key: str, others: Iterable[str]) -> bool:
    """Whether `key` is one of `others`, lies beneath one, or holds one."""
    return any(
        key == other or key.startswith(other + ".") or other.startswith((key + ".", key + "["))
        for other in others
        if other
    )


def _dotted(location: Iterable[str | int]) -> str:
    """run.name, cluster.ranks_per_node[0]."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(
        "."
    )
