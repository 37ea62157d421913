"""Strict YAML and JSON: a misspelt or mistyped key is refused, with file, key and nearest key."""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, is_typeddict

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError


class StrictModel(BaseModel):
    """Base of every configuration section: unknown keys are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


# A string where a list of one is meant.
Globs = Annotated[list[str], BeforeValidator(_as_list)]

MOST_LISTED = 8  # keys in an error
MAX_VALUES = 100_000  # of a YAML file, its aliases written out

Model = TypeVar("Model", bound=BaseModel)


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys silently; here the second one is an error."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except yaml.YAMLError:
            raise  # says where by itself
        except (ValueError, TypeError) as error:  # a date or a number that is none
            if str(error).startswith("line "):
                raise
            raise ValueError(f"line {node.start_mark.line + 1}: {error}") from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, Hashable):
                raise ValueError(f"line {line}: a key must be text, not {type(key).__name__}")
            if key in seen:
                raise ValueError(f"line {line}: key {key!r} stands there twice; keep one")
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not YAML, not a mapping, or says a key twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not valid YAML: no text ({error})") from error
    content = parse_yaml(text, str(path))
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected `key: value` lines, found {type(content).__name__}")
    return content


def parse_yaml(text: str, source: str) -> Any:
    """Any YAML value; ``source`` says where it is from.

    Raises:
        ValueError: it is not YAML, says a key twice, or is nested or aliased beyond reason; names
            source and line.
    """
    try:
        loader = _UniqueKeyLoader(text)  # a SafeLoader: it builds plain data only
        node = loader.get_single_node()
        _refuse_bomb(node)
        return None if node is None else loader.construct_document(node)
    except RecursionError:
        raise ValueError(f"{source}: nested too deeply to be a configuration") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f"line {mark.line + 1}: "
        what = ", ".join(filter(None, (error.context, error.problem)))
        raise ValueError(f"{source}: not valid YAML: {where}{what}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{source}: not valid YAML: {error}") from error


def line_of(path: Path, key: Sequence[int | str]) -> int | None:
    """The line of a YAML or JSON file in which a key stands; None where it is not there."""
    line = None
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, OSError, RecursionError):
        return None
    for part in key:
        found = _child(node, part)
        if found is None:
            return None
        line, node = found
    return line


def _child(node: yaml.Node | None, part: int | str) -> tuple[int, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == str(part):
                return key.start_mark.line + 1, value
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part].start_mark.line + 1, node.value[part]
    return None


def _refuse_bomb(root: yaml.Node | None) -> None:
    """Aliases of aliases: a few lines that stand for billions of values."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node | None) -> int:
        if not isinstance(node, yaml.CollectionNode):
            return 1
        if id(node) not in sizes:
            sizes[id(node)] = MAX_VALUES + 1  # while it is being counted: it holds itself
            parts = (
                itertools.chain(*node.value) if isinstance(node, yaml.MappingNode) else node.value
            )
            sizes[id(node)] = 1 + sum(size(part) for part in parts)
        return sizes[id(node)]

    if size(root) > MAX_VALUES:
        raise ValueError(f"its aliases stand for more than {MAX_VALUES:,} values")


def parse_json(text: str, source: str, remedy: str) -> dict[str, Any]:
    """A JSON object from a file or a line of one; ``source`` says which.

    Raises:
        ValueError: it is something else; names source, line and remedy.
    """
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        where = f", line {error.lineno}" if text.count("\n") > 1 else ""
        raise ValueError(f"{source} is damaged: not JSON ({error.msg}{where}); {remedy}") from error
    except RecursionError:
        raise ValueError(f"{source}: nested too deeply; {remedy}") from None
    except ValueError as error:  # numbers of thousands of digits
        raise ValueError(f"{source}: {error}; {remedy}") from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ValueError(f"{source}: expected an object {{…}}, found {kind}; {remedy}")
    return content


def validate(
    model: type[Model],
    content: dict[str, Any],
    source: str | Path,
    file: Path | None = None,
    overridden: Collection[str] = (),
    *,
    removed: Mapping[str, object] = MappingProxyType({}),
    remedy: str = "",
) -> Model:
    """Builds ``model`` from ``content``; ``source`` begins every error line.

    Args:
        model: what the content must be.
        content: as it was read.
        source: where the content is from: words, or the YAML or JSON file itself.
        file: the file in which the lines of keys are looked for; by default ``source``, if it is
            a path.
        overridden: dotted keys whose values are not from that file.
        removed: dotted keys of earlier versions, each with the value that now always holds.
        remedy: what to do about an error, if the key alone does not say it.

    Raises:
        ValueError: one line per wrong key, each naming source, line, key and remedy.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        lines = []
        file = source if isinstance(source, Path) else file
        for item in error.errors():
            is_here = ".".join(map(str, item["loc"])) not in overridden
            number = line_of(file, item["loc"]) if file is not None and is_here else None
            where = source if number is None else f"{source}, line {number}"
            lines.append(f"{where}: {_explain(model, item, removed)}")
        raise ValueError("\n".join(lines) + (remedy and f"; {remedy}")) from None


def _explain(model: type[BaseModel], item: Any, removed: Mapping[str, object]) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden" and key in removed:
        return (
            f"key '{key}' was removed, and is always {removed[key]} now: delete it; what was "
            "trained with another value needs the version that trained it"
        )
    if item["type"] == "extra_forbidden":
        return f"unknown key '{key}'{nearest(model, key)}"
    if item["type"] == "missing":
        return f"key '{key}' is missing"
    words = _WORDS.get(item["type"])
    message = words.format(**item.get("ctx", {})) if words else item["msg"]
    message = message.removeprefix("Value error, ")
    if not key:
        return message
    return f"key '{key}': {message} (got {item['input']!r})"


# pydantic's own messages name its classes and regular expressions.
_NUMBER, _WHOLE, _TEXT = "must be a number", "must be a whole number", "must be text"
_WORDS = {
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_from_float": _WHOLE,
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": _NUMBER,
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": f"{_TEXT}; in quotes, should it look like something else",
    "string_pattern_mismatch": (
        "must begin with a letter or a digit, and hold only letters, digits, '.', '_' and '-'"
    ),
    "list_type": "must be a list, such as [a, b]",
    "dict_type": "must be a section of `key: value` lines",
    "model_type": "must be a section of `key: value` lines",
    "model_attributes_type": "must be a section of `key: value` lines",
    "literal_error": "must be {expected}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
}


def nearest(model: type[BaseModel], key: str) -> str:
    """The end of a sentence about a key that ``model`` has not: which one was meant."""
    section, _, name = key.rpartition(".")
    by_section: dict[str, dict[str, str]] = {}  # name: key
    for valid in all_keys(model):
        by_section.setdefault(valid.rpartition(".")[0], {})[valid.rpartition(".")[2]] = valid
    if section not in by_section:
        section = ""
    beside = by_section[section]
    elsewhere = {name: key for names in by_section.values() for name, key in names.items()}
    for names in (beside, elsewhere):  # the right name may be in the wrong section
        if close := difflib.get_close_matches(name, names, n=1, cutoff=0.6):
            return f"; nearest valid key: '{names[close[0]]}'"
    if len(beside) > MOST_LISTED:
        names = elsewhere if beside is by_section[""] else beside
        close = difflib.get_close_matches(name, names, n=3, cutoff=0)
        return f"; nearest valid keys: {', '.join(repr(names[found]) for found in close)}"
    where = f" of {section}" if section else ""
    return f"; valid keys{where}: {', '.join(beside)}"


@dataclass(frozen=True)
class Key:
    """A key of a configuration, for people."""

    name: str  # dotted
    type: str
    default: str | None  # as YAML; None where it must be given
    description: str


def describe_keys(model: type[BaseModel], prefix: str = "") -> list[Key]:
    """Every key of ``model`` that has a value, in order."""
    keys: list[Key] = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += describe_keys(field.annotation, f"{prefix}{name}.")
            continue
        default = None
        if not field.is_required():
            default = json.dumps(field.get_default(call_default_factory=True), ensure_ascii=False)
        kind = " ".join([_type_name(field.annotation), *map(_limit, field.metadata)])
        keys.append(Key(prefix + name, kind.strip(), default, field.description or ""))
    return keys


def _type_name(annotation: Any) -> str:
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return " | ".join(map(str, arguments))
    if get_origin(annotation) is Annotated:  # PositiveInt inside of `PositiveInt | None`
        limits = filter(None, map(_limit, arguments[1:]))
        return " ".join([_type_name(arguments[0]), *limits])
    if get_origin(annotation) in (Union, UnionType):
        return " | ".join(map(_type_name, arguments))
    if get_origin(annotation) is list:
        return f"list of {_type_name(arguments[0])}"
    if get_origin(annotation) is dict:
        return f"{{{_type_name(arguments[0])}: {_type_name(arguments[1])}, …}}"
    names = {int: "whole number", float: "number", str: "text", bool: "true | false"}
    other = "{field: value, …}" if is_typeddict(annotation) else str(annotation)
    return names.get(annotation, "null" if annotation is type(None) else other)


def _limit(constraint: Any) -> str:
    signs = (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
    found = [(sign, getattr(constraint, name, None)) for name, sign in signs]
    return " ".join(f"{sign} {limit}" for sign, limit in found if limit is not None)


def all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key that ``model`` accepts, sections before their keys."""
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += all_keys(field.annotation, f"{prefix}{name}.")
    return keys


def flatten(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested sections by their dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        inner = isinstance(value, dict)
        flat |= flatten(value, f"{prefix}{key}.") if inner else {prefix + key: value}
    return flat
