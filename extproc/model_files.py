"""A model's tokenizer and chat template, from the folder that the engines load them from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from extproc.prompt_reader import PoolText
from predictor.chat import ChatTemplate
from predictor.tokenizer import Tokenizer


class BadModelFiles(ValueError):
    """Names the file and what is wrong with it."""


def load_pool_text(folder: Path | None) -> PoolText:
    """Reads `tokenizer.json`, and the chat template from `chat_template.jinja` or `tokenizer_config.json`.

    Without a folder prompts are estimated; without a template only chat prompts are. Raises BadModelFiles.
    """
    if folder is None:
        return PoolText(None, None)
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadModelFiles(f"{path}: {error}") from error
    settings = _settings(folder / "tokenizer_config.json")
    source, origin = _template_source(folder, settings)
    if source is None:
        return PoolText(tokenizer, None)
    try:
        return PoolText(tokenizer, ChatTemplate(source, _special_tokens(settings)))
    except ValueError as error:
        raise BadModelFiles(f"{origin}: {error}") from error


def _settings(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadModelFiles(f"{path}: {error}") from error


def _template_source(folder: Path, settings: dict[str, Any]) -> tuple[str | None, Path]:
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8"), path
        except (OSError, UnicodeDecodeError) as error:
            raise BadModelFiles(f"{path}: {error}") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        # Named templates; the one for tools is chosen by engines only when tools are given.
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[-1].get("template") if named else None
    return template if isinstance(template, str) else None, folder / "tokenizer_config.json"


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Template variables such as `bos_token`; their values are strings, or objects with the string as `content`."""
    tokens = {}
    for key, value in settings.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            tokens[key] = content
    return tokens
