"""Errors of the HTTP API, in the shape vLLM gives them."""

import re
from http import HTTPStatus

import msgspec


class ApiError(Exception):
    """A refusal that goes to the client: status, OpenAI error type, message, and the field at fault if there is one."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self._error = {"message": message, "type": kind, "param": param, "code": status}

    def body(self) -> bytes:
        """The JSON body."""
        return msgspec.json.encode({"error": self._error})

    def anthropic_body(self) -> bytes:
        """The same as `/v1/messages` gives it."""
        error = {"type": self._error["type"], "message": self._error["message"]}
        return msgspec.json.encode({"type": "error", "error": error})


def bad_request(message: str, param: str | None = None) -> ApiError:
    """400 for a request that is well formed but cannot be served."""
    return ApiError(HTTPStatus.BAD_REQUEST, "BadRequestError", message, param)


def unknown_model(model: str) -> ApiError:
    """404 for a model this engine does not serve."""
    return ApiError(HTTPStatus.NOT_FOUND, "NotFoundError", f"The model `{model}` does not exist.", "model")


def invalid_body(error: Exception, body_bytes: int) -> ApiError:
    """400 for a body that is no JSON, lacks a field, or has one of the wrong type; of type "Bad Request" as in vLLM.

    The param is the place, as `body.FIELD` or `body.POSITION`.
    """
    text = str(error)
    if isinstance(error, msgspec.ValidationError):
        named = re.search(r"field `(\w+)`|at `\$\.(\w+)", text)
        place = f".{named.group(1) or named.group(2)}" if named else ""
    else:
        position = re.search(r"\(byte (\d+)\)", text)
        place = f".{position.group(1) if position else body_bytes}"
        text = f"JSON decode error: {text}"
    return ApiError(
        HTTPStatus.BAD_REQUEST, HTTPStatus.BAD_REQUEST.phrase, f"1 validation error: {text}", f"body{place}"
    )
