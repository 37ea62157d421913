"""Strict YAML and JSON: a misspelt or mistyped key is refused, with file, key and nearest key."""

import copy
import functools
import json
import re
from collections.abc import Collection, Hashable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
)

from sparsellm.recipe.keys import all_keys, nearest


class StrictModel(BaseModel):
    """Base of every configuration section: unknown keys are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="wrap")
    @classmethod
    def _no_switch_for_a_number(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        validated = handler(value)
        if _has_switch_for_a_number(value, validated):  # pydantic takes true as 1
            raise ValueError("must be a number, not true or false")
        return validated


def _has_switch_for_a_number(value: object, validated: object) -> bool:
    """Whether true or false, also within a list or a mapping, has become something else."""
    if isinstance(value, dict) and isinstance(validated, dict):  # maybe in another order
        return any(
            _has_switch_for_a_number(value.get(key), item) for key, item in validated.items()
        )
    if isinstance(value, list) and isinstance(validated, list | tuple):
        return any(map(_has_switch_for_a_number, value, validated))
    return isinstance(value, bool) and not isinstance(validated, bool)


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


# A string where a list of one is meant.
Globs = Annotated[list[str], BeforeValidator(_as_list)]

Model = TypeVar("Model", bound=BaseModel)


_INTEGER = "tag:yaml.org,2002:int"
_OTHER_BASES = re.compile(r"[-+]?0[0-7_]+|[-+]?[1-9].*:.*")  # 010 is octal, and 1:30 is 90


class _StrictLoader(yaml.SafeLoader):
    """Loads plain data. Aliases are refused, since a few lines of them can stand for billions of
    values. A key that occurs twice is an error; PyYAML would silently keep the last."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):  # type: ignore[no-untyped-call]
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            problem = "aliases (*name) are not allowed: write the value out"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag == _INTEGER and _OTHER_BASES.fullmatch(node.value):
            meant = super().construct_object(node)
            raise yaml.MarkedYAMLError(
                problem=f"YAML reads {node.value} as {meant}: write {meant}, a number without "
                "leading zeros, or text in quotes",
                problem_mark=node.start_mark,
            )
        try:
            return super().construct_object(node, deep)
        except ValueError as error:  # an invalid date or number
            raise yaml.MarkedYAMLError(problem=str(error), problem_mark=node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names: set[str] = set()
        for key, _ in node.value:
            if (name := str(key.value)) in names:
                problem = f"key {name!r} occurs twice; keep one"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            names.add(name)
        return super().construct_mapping(node, deep)


def load_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not YAML, not a mapping, or has a key twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not valid YAML: it is not text in UTF-8 ({error})") from error
    content = parse_yaml(text, str(path))
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected `key: value` lines, found {type(content).__name__}")
    return content


def parse_yaml(text: str, source: str) -> Any:
    """Any YAML value; ``source`` says where it is from.

    Raises:
        ValueError: it is not YAML, has a key twice, has an alias or is nested too deeply; the
            message names source and line.
    """
    try:
        return copy.deepcopy(_parsed(text))
    except RecursionError:
        raise ValueError(f"{source}: nested too deeply to be a configuration") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f"line {mark.line + 1}: "
        problem = ", ".join(filter(None, (error.context, error.problem)))
        raise ValueError(f"{source}: not valid YAML: {where}{problem}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{source}: not valid YAML: {error}") from error


@functools.lru_cache
def _parsed(text: str) -> Any:
    """The runs of a sweep, for one, all read the same recipe."""
    return yaml.load(text, _StrictLoader)


def yaml_line(value: Any) -> str:
    """A value as YAML on one line.

    Raises:
        yaml.YAMLError: it is not plain data.
    """
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True)
    return text.removesuffix("\n...\n").strip()


def line_of(path: Path, key: Sequence[int | str]) -> int | None:
    """The line of a key in a YAML or JSON file; None if the key is not there."""
    line = None
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, OSError, RecursionError):
        return None
    for part in key:
        children: dict[Any, tuple[yaml.Node, yaml.Node]] = {}
        if isinstance(node, yaml.MappingNode):
            children = {key.value: (key, value) for key, value in node.value}
        elif isinstance(node, yaml.SequenceNode):
            children = {str(index): (item, item) for index, item in enumerate(node.value)}
        if str(part) not in children:
            return None
        at, node = children[str(part)]
        line = at.start_mark.line + 1
    return line


def parse_json(text: str, source: str, remedy: str) -> dict[str, Any]:
    """A JSON object from a file or a line of one; ``source`` says which.

    Raises:
        ValueError: it is something else; the message names source, line and remedy.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = str(error)
        if isinstance(error, json.JSONDecodeError):
            problem = error.msg + (f", line {error.lineno}" if text.count("\n") > 1 else "")
        raise ValueError(f"{source} is damaged: not JSON ({problem}); {remedy}") from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ValueError(f"{source}: expected an object {{…}}, found {kind}; {remedy}")
    return content


def read_text(path: Path, remedy: str) -> str:
    """The text of a file.

    Raises:
        FileNotFoundError, ValueError: the file is missing or damaged; the message names it and the
            remedy.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; {remedy}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise damaged(path, error, remedy) from error


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        FileNotFoundError, ValueError: as `read_text`, or it is something else.
    """
    return parse_json(read_text(path, remedy), str(path), remedy)


def read_model(path: Path, model: type[BaseModel], remedy: str) -> dict[str, Any]:
    """As `read_json`, but refuses an object that does not have the keys and types of ``model``."""
    content = read_json(path, remedy)
    validate(model, content, path, remedy=remedy)
    return content


def damaged(path: Path, reason: object, remedy: str) -> ValueError:
    """The error for a file that is not what was written."""
    return ValueError(f"{path} is truncated or damaged ({reason}); {remedy}")


def validate(
    model: type[Model],
    content: dict[str, Any],
    source: str | Path,
    file: Path | None = None,
    overridden: Collection[str] = (),
    *,
    remedy: str = "",
) -> Model:
    """Builds ``model`` from ``content``; ``source`` begins every error line.

    Args:
        model: what the content must be.
        content: as it was read.
        source: where the content is from: a description, or the YAML or JSON file itself.
        file: the file in which the lines of keys are looked up; by default ``source``, if it is
            a path.
        overridden: dotted keys whose values are not from that file.
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
            place = _place(model, item)
            if item["type"] == "missing" and isinstance(place[-1], int):
                place = place[:-1]  # a list of so many values, one of which is missing
            key = ".".join(map(str, place))
            # A value from --set, or one within it, is in no line of the file.
            sections = {".".join(map(str, place[:end])) for end in range(1, len(place) + 1)}
            number = line_of(file, place) if file and sections.isdisjoint(overridden) else None
            where = source if number is None else f"{source}, line {number}"
            lines.append(f"{where}: {_explain(model, key, item)}")
        raise ValueError("\n".join(lines) + (remedy and f"; {remedy}")) from None


def _place(model: type[BaseModel], item: Any) -> tuple[int | str, ...]:
    """The key that an error is about. Of several keys of a section, which contradict one another,
    it is the one with which the message begins."""
    place: tuple[int | str, ...] = item["loc"]
    first, keys = _first_word(item["msg"].removeprefix(_OURS)), all_keys(model)
    named = first in keys or first.rpartition(".")[0] in keys  # a field of a value, too
    return tuple(first.split(".")) if named else place


def _first_word(message: str) -> str:
    return message.partition(" ")[0].rstrip(":")


def _explain(model: type[BaseModel], key: str, item: Any) -> str:
    if item["type"] == "extra_forbidden":
        if key in all_keys(model):  # with its dot, as `--set` takes it
            section, _, name = key.rpartition(".")
            return f"key '{key}': write it as `{name}` within the section `{section}:`"
        return f"unknown key '{key}'{nearest(model, key)}"
    if item["type"] == "missing" and isinstance(item["loc"][-1], str):
        return f"key '{key}' is missing"
    message = _WORDS.get(item["type"], item["msg"]).removeprefix(_OURS)
    message = message.replace("Input should be", "must be")
    message = _ITEMS.sub(r"must \1", message)
    if not key or _first_word(message) == key:
        return message
    return f"key '{key}': {message} (got {item['input']!r})"


_OURS = "Value error, "  # with which pydantic begins the messages of our own checks
_ITEMS = re.compile(r"(?:List|Tuple) should (have .*) after validation")
# pydantic's own messages name its classes and regular expressions.
_WORDS = {
    "string_pattern_mismatch": (
        "must begin with a letter or a digit, and hold only letters, digits, '.', '_' and '-'"
    ),
    "string_type": "must be text; in quotes if it looks like something else",
    "tuple_type": "must be a list",
    "missing": "must have another value",
    **dict.fromkeys(
        ("dict_type", "model_type", "model_attributes_type"),
        "must be a section of `key: value` lines",
    ),
}
