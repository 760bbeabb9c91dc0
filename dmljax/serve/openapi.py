"""The description of the routes, in the format of OpenAPI 3.1."""

from __future__ import annotations

import dataclasses
from typing import Any

from dmljax.serve.settings import Settings

__all__ = ["description"]

_IMAGE = {"schema": {"type": "string", "format": "binary"}}
_BASE64 = {"type": "string", "contentEncoding": "base64"}
_VECTOR = {"type": "array", "items": {"type": "number"}}
_METADATA = {"type": "object", "additionalProperties": True}


def description(settings: Settings) -> dict[str, Any]:
    """The description of a service with these settings."""
    paths: dict[str, Any] = {
        "/embed": {"post": _embed()},
        "/search": {"get": _search_stored(), "post": _search()},
        "/items": {"get": _items(), "post": _add(), "delete": _delete()},
        "/items/image": {"get": _picture()},
        "/info": {"get": _get("Model, dimension, thresholds, size of the index", _METADATA)},
        "/healthz": {"get": _get("200 while the process lives", _METADATA)},
        "/readyz": {"get": _get("200 when requests are answered, else 503", _METADATA)},
        "/metrics": {"get": _operation("Figures for Prometheus", {"text/plain": {}})},
        "/openapi.json": {"get": _get("This description", _METADATA)},
        "/": {"get": _operation("The page", {"text/html": {}})},
    }
    result: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "dmljax",
            "version": "1",
            "description": "Embeds images and finds similar stored items. Limits: "
            + ", ".join(f"{k} {v:g}" for k, v in dataclasses.asdict(settings.limits).items()),
        },
        "paths": paths,
    }
    if settings.token_file is not None:
        result["components"] = {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}}
        for path, operations in paths.items():
            if path not in ("/", "/healthz", "/readyz", "/openapi.json"):
                for operation in operations.values():
                    operation["security"] = [{"token": []}]
    return result


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*required],
        "additionalProperties": False,
    }


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


def _operation(summary: str, content: dict[str, Any], **more: Any) -> dict[str, Any]:
    error = _object({"error": {"type": "string"}, "request_id": {"type": "string"}}, "error")
    status = more.pop("status", "200")
    return {
        "summary": summary,
        "responses": {
            status: {"description": "done", "content": content},
            "default": {
                "description": "refused, with one line",
                "content": {"application/json": {"schema": error}},
            },
        },
        **more,
    }


def _get(summary: str, schema: dict[str, Any]) -> dict[str, Any]:
    return _operation(summary, {"application/json": {"schema": schema}})


def _both(schema: dict[str, Any]) -> dict[str, Any]:
    return {kind: {"schema": schema} for kind in ("application/json", "application/msgpack")}


def _body(schema: dict[str, Any], *, images: bool) -> dict[str, Any]:
    content = _both(schema)
    if images:
        content |= {"application/octet-stream": _IMAGE, "image/*": _IMAGE}
        form = {"type": "object", "additionalProperties": {"type": "string", "format": "binary"}}
        content["multipart/form-data"] = {"schema": form}
    return {"required": True, "content": content}


def _parameter(name: str, schema: dict[str, Any], text: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "in": "query", "description": text, "schema": schema, **more}


def _options() -> dict[str, Any]:
    return {
        "k": {"type": "integer", "minimum": 1, "maximum": 1000},
        "threshold": {"type": ["number", "string"]},
        "where": _METADATA,
        "exact": {"type": "boolean"},
        "allow_fewer": {"type": "boolean"},
    }


def _option_parameters() -> list[dict[str, Any]]:
    return [
        _parameter("k", _options()["k"], "how many; fewer are an error. By default up to 10"),
        _parameter("allow_fewer", _options()["allow_fewer"], "fewer than k are no error"),
        _parameter("threshold", _options()["threshold"], "least similarity, or its name: fmr=1e-3"),
        _parameter("where", {"type": "string"}, "conditions on metadata, as JSON"),
        _parameter("exact", _options()["exact"], "compare with every item"),
    ]


def _results() -> dict[str, Any]:
    hit = _object(
        {
            "id": {"type": "string"},
            "similarity": {"type": "number"},
            "metadata": _METADATA,
            "picture": {"type": "boolean"},
        },
        "id",
        "similarity",
        "metadata",
        "picture",
    )
    hits = {"type": "array", "items": hit}
    result = _object({"match": {"type": "boolean"}, "hits": hits}, "match", "hits")
    return _object(
        {
            "results": _list(result),
            "threshold": {"type": ["number", "null"]},
            "model": {"type": "string"},
            "version": {"type": "integer"},
        },
        "results",
        "threshold",
        "model",
        "version",
    )


def _embed() -> dict[str, Any]:
    schema = _object(
        {"embeddings": _list(_VECTOR), "model": {"type": "string"}}, "embeddings", "model"
    )
    content = _both(schema) | {"application/octet-stream": _IMAGE}
    body = _body(_object({"images": _list(_BASE64)}, "images"), images=True)
    return _operation("Embeddings of images", content, requestBody=body)


def _search() -> dict[str, Any]:
    query = {
        "images": _list(_BASE64),
        "vectors": _list(_VECTOR),
        "ids": _list({"type": "string"}),
    }
    return _operation(
        "The most similar items of images, vectors or stored items",
        _both(_results()),
        parameters=_option_parameters(),
        requestBody=_body(_object(query | _options()), images=True),
    )


def _search_stored() -> dict[str, Any]:
    identifier = _parameter("id", _list({"type": "string"}), "ids of stored items", required=True)
    return _operation(
        "The most similar items of stored items",
        _both(_results()),
        parameters=[identifier, *_option_parameters()],
    )


def _items() -> dict[str, Any]:
    item = _object(
        {
            "id": {"type": "string"},
            "metadata": _METADATA,
            "picture": {"type": "boolean"},
            "vector": _VECTOR,
        },
        "id",
        "metadata",
        "picture",
    )
    return _operation(
        "Items by id, or some items at random",
        _both(_object({"items": {"type": "array", "items": item}}, "items")),
        parameters=[
            _parameter("id", _list({"type": "string"}), "ids"),
            _parameter("limit", {"type": "integer", "minimum": 1, "maximum": 100}, "how many"),
            _parameter("seed", {"type": "integer"}, "another choice"),
            _parameter("vectors", {"type": "boolean"}, "also the vectors"),
        ],
    )


def _add() -> dict[str, Any]:
    item = _object(
        {"id": {"type": "string"}, "image": _BASE64, "vector": _VECTOR, "metadata": _METADATA}, "id"
    )
    schema = _object({"items": _list(item), "replace": {"type": "boolean"}}, "items")
    answer = _object({"added": {"type": "integer"}, "version": {"type": "integer"}}, "added")
    return _operation(
        "Adds items: all or none (with --allow-add)",
        _both(answer),
        status="201",
        requestBody=_body(schema, images=False),
    )


def _delete() -> dict[str, Any]:
    answer = _object({"deleted": {"type": "integer"}, "version": {"type": "integer"}}, "deleted")
    return _operation(
        "Deletes items: all or none (with --allow-delete)",
        _both(answer),
        parameters=[_parameter("id", _list({"type": "string"}), "ids", required=True)],
    )


def _picture() -> dict[str, Any]:
    return _operation(
        "A small picture of a stored item",
        {"image/jpeg": _IMAGE},
        parameters=[_parameter("id", {"type": "string"}, "the id", required=True)],
    )
