"""Strict YAML: a misspelt or mistyped key is refused, with file, key and the nearest valid key."""

from __future__ import annotations

import difflib
from collections.abc import Hashable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError


class StrictModel(BaseModel):
    """Base of every configuration section: unknown keys are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


# A string where a list of one is meant.
Globs = Annotated[list[str], BeforeValidator(_as_list)]

Model = TypeVar("Model", bound=BaseModel)


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys silently; here the second one is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                line = key_node.start_mark.line + 1
                raise ValueError(f"line {line}: key {key!r} stands there twice; keep one")
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not YAML, not a mapping, or says a key twice.
    """
    text = path.read_text(encoding="utf-8")
    try:
        # A SafeLoader subclass: it builds plain data only.
        content = yaml.load(text, Loader=_UniqueKeyLoader)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected `key: value` lines, found {type(content).__name__}")
    return content


def validate(model: type[Model], content: dict[str, Any], source: str) -> Model:
    """Builds ``model`` from ``content``; ``source`` (a file, say) begins every error line.

    Raises:
        ValueError: one line per wrong key, each naming source, key and remedy.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        lines = [_explain(model, item) for item in error.errors()]
        raise ValueError("\n".join(f"{source}: {line}" for line in lines)) from None


def _explain(model: type[BaseModel], item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"unknown key '{key}'{_nearest(model, key)}"
    if item["type"] == "missing":
        return f"key '{key}' is missing"
    message = item["msg"].removeprefix("Value error, ")
    if not key:
        return message
    return f"key '{key}': {message} (got {item['input']!r})"


def _nearest(model: type[BaseModel], key: str) -> str:
    valid = list(all_keys(model))
    close = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    if not close:  # The right name in the wrong section.
        leaf = key.rsplit(".", 1)[-1]
        close = [name for name in valid if name.rsplit(".", 1)[-1] == leaf][:1]
    return f"; nearest valid key: '{close[0]}'" if close else f"; valid keys: {', '.join(valid)}"


def all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key that ``model`` accepts, sections before their keys."""
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += all_keys(field.annotation, f"{prefix}{name}.")
    return keys
