"""Make the OpenAPI document; `python -m gnnplan.api.openapi` writes the committed openapi.json."""

import json
import tempfile
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

COMMITTED = Path(__file__).with_name("openapi.json")
METHODS = ("get", "put", "post", "delete", "patch", "head", "options")


def document(app: FastAPI) -> dict[str, Any]:
    """Return an application's document, in which every refusal is a problem document."""
    if app.openapi_schema is None:
        found = get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            routes=app.routes,
            openapi_version=app.openapi_version,
        )
        _with_problems(found)
        app.openapi_schema = found
    return app.openapi_schema


def _with_problems(found: dict[str, Any]) -> None:
    from gnnplan.api.resources import Problem

    schemas = found.setdefault("components", {}).setdefault("schemas", {})
    schemas["Problem"] = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    for name in ("Job", "Run"):
        schemas[name]["properties"]["problem"] = {
            "anyOf": [{"$ref": "#/components/schemas/Problem"}, {"type": "null"}]
        }
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    problem = {"schema": {"$ref": "#/components/schemas/Problem"}}
    for path in found["paths"].values():
        for method in METHODS:
            if method in path:
                operation = path[method]
                operation["responses"].pop("422", None)
                for status, words in refusals(operation).items():
                    operation["responses"][status] = {
                        "description": words,
                        "content": {"application/problem+json": problem},
                    }


def refusals(operation: dict[str, Any]) -> dict[str, str]:
    """Return what an operation may be refused for, by status."""
    found: dict[str, str] = {}
    if "security" in operation:
        found["401"] = "A key is needed, and none or a wrong one was given."
        found["403"] = "The key may not do this, or what is named may not be used."
    if any(each["in"] == "path" for each in operation.get("parameters", [])):
        found["404"] = "There is no such thing."
        found["409"] = "The state of things does not allow this now; `type` says why."
    if "requestBody" in operation:
        found["413"] = "The body is too large."
        found["415"] = "The body is not JSON."
    found["422"] = "The request is understood and wrong."
    found["429"] = "Too many requests or jobs; Retry-After says how long to wait."
    found["503"] = "The service cannot answer now."
    found["default"] = "Another problem (RFC 9457)."
    return found


def text_of(app: FastAPI) -> str:
    """Return the document as the committed text."""
    return json.dumps(document(app), indent=1, sort_keys=True) + "\n"


def write() -> None:
    """Write the committed document."""
    from gnnplan.api.app import create_app

    with tempfile.TemporaryDirectory() as folder:
        COMMITTED.write_text(text_of(create_app(Path(folder))))


if __name__ == "__main__":
    write()
