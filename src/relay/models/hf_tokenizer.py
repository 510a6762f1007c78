"""The texts of a Hugging Face folder: tokenizer.json, special tokens, chat template, generation defaults."""

import json
from pathlib import Path
from typing import Any

from relay.errors import CorruptModelError
from relay.models.checkpoint import TokenizerFiles


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CorruptModelError."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CorruptModelError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise CorruptModelError(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise CorruptModelError(f"{path}: not a JSON object")
    return value


def read_text(path: Path) -> str:
    """Raises CorruptModelError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CorruptModelError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise CorruptModelError(f"{path}: not UTF-8 ({error})") from error


def optional_json(path: Path) -> dict[str, Any]:
    """``read_json``, or an empty object if there is no such file."""
    return read_json(path) if path.exists() else {}


def read_tokenizer_files(folder: Path, generation: dict[str, Any]) -> TokenizerFiles:
    """tokenizer.json with what tokenizer_config.json and the chat template files add to it.

    Whether a prompt gets BOS is tokenizer.json's word alone: transformers 5 does not look at add_bos_token beside it either.
    """
    path = folder / "tokenizer.json"
    settings = optional_json(folder / "tokenizer_config.json")
    special = _special_tokens({**optional_json(folder / "special_tokens_map.json"), **settings})
    return TokenizerFiles(
        json=read_text(path) if path.exists() else "",
        chat_template=_chat_template(folder, settings),
        special_tokens=special,
        generation={key: value for key, value in generation.items() if not key.startswith("_")},
    )


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    roles = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
    found = {}
    for role in roles:
        value = settings.get(role)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[role] = value
    return found


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja, else chat_template.json, else tokenizer_config.json (a list of named ones: ``default``)."""
    if (folder / "chat_template.jinja").exists():
        return read_text(folder / "chat_template.jinja")
    value = optional_json(folder / "chat_template.json").get("chat_template", settings.get("chat_template"))
    if isinstance(value, list):
        named = {entry["name"]: entry["template"] for entry in value if isinstance(entry, dict) and "name" in entry}
        value = named.get("default")
    return value if isinstance(value, str) else None
