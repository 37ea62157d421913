"""The keys of a configuration: their dotted names, their types in words, which one was meant."""

import difflib
import json
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel


def nearest(model: type[BaseModel], key: str) -> str:
    """The end of a sentence about a key that ``model`` does not have: which one was meant."""
    keys = all_keys(model)
    section, _, name = key.rpartition(".")
    beside = [valid for valid in keys if section and valid.rpartition(".")[0] == section]
    for some in (beside, keys):  # the right name may be in the wrong section
        names = {valid.rpartition(".")[2]: valid for valid in reversed(some)}
        if close := difflib.get_close_matches(name, names, n=1):
            return f"; nearest valid key: '{names[close[0]]}'"
    close = difflib.get_close_matches(key, beside or keys, n=3, cutoff=0)
    return f"; nearest valid keys: {', '.join(map(repr, close))}"


@dataclass(frozen=True)
class Key:
    """A key of a configuration, as `sparsellm recipe keys` shows it."""

    name: str  # dotted
    type: str
    default: str | None  # as YAML; None where it must be given
    description: str


def describe_keys(model: type[BaseModel], prefix: str = "") -> list[Key]:
    """Every key of ``model`` that has a value, in order."""
    keys: list[Key] = []
    for name, schema in model.model_json_schema()["properties"].items():
        if section := section_of(model, name):
            keys += describe_keys(section, f"{prefix}{name}.")
            continue
        default = None
        if "default" in schema:
            default = json.dumps(schema["default"], ensure_ascii=False)
        keys.append(Key(prefix + name, _type(schema), default, schema.get("description", "")))
    return keys


_TYPES = {"integer": "whole number", "string": "text", "boolean": "true | false"}
_LIMITS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}


def _type(schema: dict[str, Any]) -> str:
    """A JSON schema's type and limits in words."""
    if "anyOf" in schema:
        return " | ".join(map(_type, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return " | ".join(map(str, schema.get("enum", [schema.get("const")])))
    kind = schema.get("type", "object")
    if "prefixItems" in schema:
        return f"[{', '.join(map(_type, schema['prefixItems']))}]"
    if kind == "array":
        return f"list of {_type(schema['items'])}"
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"{{text: {_type(values)}, …}}" if values else "{field: value, …}"
    limits = [f"{sign} {schema[limit]}" for limit, sign in _LIMITS.items() if limit in schema]
    return " ".join([_TYPES.get(kind, kind), *limits])


def section_of(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The model of a section; None for a key that has a value, or that ``model`` does not have."""
    field = model.model_fields.get(name)
    kind = field.annotation if field else None
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key that ``model`` accepts, sections before their keys."""
    keys = []
    for name in model.model_fields:
        keys.append(prefix + name)
        if section := section_of(model, name):
            keys += all_keys(section, f"{prefix}{name}.")
    return keys


def flatten(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested sections by their dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        inner = isinstance(value, dict)
        flat |= flatten(value, f"{prefix}{key}.") if inner else {prefix + key: value}
    return flat
