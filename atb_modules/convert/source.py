"""Checked access to a foreign configuration: every error names the file, the key and what came."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from atb_modules.checks import LARGEST_COUNT

MAX_LAYERS = 10_000


def parse_json(raw: str | bytes, where: str) -> Any:
    """The value of a JSON text; whatever is wrong with it is a ValueError that begins with `where`."""
    try:
        return json.loads(raw)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{where} is not JSON that can be read: it is nested too deeply") from None


class ConfigSource:
    """A foreign configuration (config.json, or the metadata of a GGUF) and the file it was read from."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self.values = values
        self.path = path

    def error(self, message: str) -> ValueError:
        return ValueError(f"{self.path}: {message}")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def count(self, key: str, default: int | None = None) -> int:
        """A positive int; without a default the key is required."""
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"the key {key!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(f"{key} is {value!r}; allowed: a positive integer")
        return value

    def layers(self, key: str) -> int:
        """A number of layers, bounded so that a wrong one cannot fill the memory with names."""
        value = self.count(key)
        if value > MAX_LAYERS:
            raise self.error(f"{key} is {value}; allowed: 1 to {MAX_LAYERS}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number; without a default the key is required."""
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"the key {key!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{key} is {value!r}; allowed: a number")
        if not -sys.float_info.max <= value <= sys.float_info.max:
            raise self.error(f"{key} is {value!r:.40}; allowed: a finite number")
        return float(value)

    def positive(self, key: str, default: float) -> float:
        """A number above 0."""
        value = self.number(key, default)
        if value <= 0:
            raise self.error(f"{key} is {value}; allowed: a positive number")
        return value

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if self.has(key) else None

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{key} is {value!r}; allowed: true or false")
        return value

    def word(self, key: str, default: str) -> str:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(f"{key} is {value!r}; allowed: a string")
        return value

    def choice(self, key: str, default: str, allowed: Mapping[str, str]) -> str:
        """What `allowed` maps the word to."""
        value = self.word(key, default)
        if value not in allowed:
            raise self.error(f"{key} is {value!r}; allowed: {', '.join(sorted(allowed))}")
        return allowed[value]

    def mapping(self, key: str) -> dict[str, Any]:
        """An object, empty where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.error(f"{key} is {value!r}; allowed: an object")
        return dict(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them; empty where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return ()
        ids = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= LARGEST_COUNT:
                raise self.error(
                    f"{key} is {value!r:.200}; allowed: a token id or a list of token ids, each of 0 to {LARGEST_COUNT}"
                )
        return tuple(ids)


def head_counts(source: ConfigSource) -> tuple[int, int]:
    """(num_heads, num_kv_heads) of a config.json."""
    num_heads = source.count("num_attention_heads")
    num_kv_heads = source.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise source.error(
            f"num_attention_heads is {num_heads}, which num_key_value_heads {num_kv_heads} does not divide"
        )
    return num_heads, num_kv_heads


def head_size(source: ConfigSource, num_heads: int, default: int | None = None) -> int:
    """head_dim of a config.json; hidden_size / num_attention_heads where neither it nor a default is
    given.
    """
    if default is None and not source.has("head_dim"):
        hidden = source.count("hidden_size")
        if hidden % num_heads:
            raise source.error(
                f"hidden_size is {hidden}, which num_attention_heads {num_heads} does not divide; head_dim is absent"
            )
        default = hidden // num_heads
    return source.count("head_dim", default)
