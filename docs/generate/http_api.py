"""The HTTP API as Markdown, from the OpenAPI document that the service is tested against."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def http_reference(path: Path) -> str:
    """Every route with what it takes and answers, then every schema with its fields."""
    document = json.loads(path.read_text(encoding="utf-8"))
    lines = ["## Routes", ""]
    for route, methods in document["paths"].items():
        for method, operation in methods.items():
            lines += [f"### {method.upper()} {route}", "", f"{operation['summary']}.", ""]
            lines += [operation["description"], ""] if "description" in operation else []
            body = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if body:
                lines += [f"Takes {_type(body['schema'])}.", ""]
            answers = operation["responses"]
            good = answers["200"].get("content", {}).get("application/json", {}).get("schema")
            if good:
                lines += [f"Answers {_type(good)}.", ""]
            refusals = [f"{status} {answer['description']}" for status, answer in answers.items() if status != "200"]
            if refusals:
                lines += ["Otherwise: " + "; ".join(refusals) + ".", ""]
    lines += ["## Schemas", ""]
    for name, schema in sorted(document["components"]["schemas"].items()):
        lines += [f"### {name}", "", schema.get("description", ""), ""]
        if fields := schema.get("properties"):
            lines += ["| field | type | meaning |", "|---|---|---|"]
            required = schema.get("required", [])
            for field, about in fields.items():
                default = "" if field in required or "default" not in about else _default(about["default"])
                meaning = " ".join(about.get("description", "").split()).replace("|", "\\|")
                lines.append(f"| `{field}` | {_type(about)} | {meaning}{default} |")
            lines.append("")
    return "\n".join(lines)


def _default(value: Any) -> str:
    return "" if value in (None, [], {}) else f" Default `{json.dumps(value)}`."


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(one) for one in schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"array of {_type(schema.get('items', {}))}"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'])}"
    return str(schema.get("type", "any value"))
