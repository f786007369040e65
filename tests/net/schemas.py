"""JSON schemas by what travels: field names, types, tags and defaults. Names of classes and docstrings do not count."""

from __future__ import annotations

import json
from typing import Any

import msgspec

NAMED_BY = 4
"""A class without a tag is named by so many of its fields."""


def plain_schema(kind: Any) -> Any:
    """The schema of a type, each class named by its tag, or else by its fields."""
    schema = json.loads(json.dumps(msgspec.json.schema(kind)))
    definitions = schema.pop("$defs", {})
    names = _names(definitions)
    told = {names[name]: _plain(one, names) for name, one in definitions.items()}
    return {"is": _plain(schema, names), "where": dict(sorted(told.items()))}


def _names(definitions: dict[str, Any]) -> dict[str, str]:
    taken: dict[str, str] = {}
    names: dict[str, str] = {}
    for name in sorted(definitions, key=lambda name: json.dumps(_nameless(definitions[name]), sort_keys=True)):
        found = _by_content(definitions[name])
        while taken.get(found, name) != name:
            found += "'"
        taken[found] = name
        names[name] = found
    return names


def _by_content(definition: dict[str, Any]) -> str:
    fields = definition.get("properties", {})
    for tag in ("type", "event"):
        if "enum" in fields.get(tag, {}) and len(fields[tag]["enum"]) == 1:
            return f"{tag} {fields[tag]['enum'][0]}"
    more = ", ..." if len(fields) > NAMED_BY else ""
    return f"of {', '.join([*fields][:NAMED_BY])}{more}" if fields else f"one of {definition.get('enum')}"[:80]


def _nameless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _nameless(one) for key, one in value.items() if key not in ("title", "description", "$ref")}
    return [_nameless(one) for one in value] if isinstance(value, list) else value


def _plain(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, list):
        return [_plain(one, names) for one in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        return {"ref": names[value["$ref"].removeprefix("#/$defs/")]}
    told: dict[str, Any] = {}
    for key, one in value.items():
        if key == "properties":
            told[key] = {name: _plain(kind, names) for name, kind in one.items()}
        elif key == "anyOf":
            told[key] = sorted((_plain(kind, names) for kind in one), key=lambda kind: json.dumps(kind, sort_keys=True))
        elif key not in ("title", "description", "discriminator"):
            told[key] = _plain(one, names)
    return told
