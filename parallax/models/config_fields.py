"""The fields of a config.json, each read with its range; what is wrong with them, as sentences."""

from __future__ import annotations

import math
from typing import Any

MOST = (1 << 31) - 1  # of a whole number; what is more is a mistake


class Fields:
    """The fields of a configuration; what is wrong with those that were asked for is collected in `problems`."""

    def __init__(self, fields: dict[str, Any], source: str) -> None:
        self.fields, self.source = fields, source
        self.problems: list[str] = []

    def refuse(self, what: str) -> None:
        self.problems.append(f"{self.source}: {what}")

    def shown(self, name: str) -> str:
        return shown(self.fields[name]) if name in self.fields else "(absent)"

    def whole(self, name: str, default: int | None = None, most: int = MOST) -> int:
        """Return a whole number from 1 on; absent or null it is `default`, which may be 0."""
        value = self.fields.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value <= most:
            self.refuse(f"{name} {self.shown(name)} must be a whole number from 1 to {most}")
            return 1
        return value

    def number(self, name: str, default: float, within: dict[str, Any] | None = None) -> float:
        """Return a finite number above 0; within: the part of the configuration that it is in."""
        value = (self.fields if within is None else within).get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            self.refuse(f"{name} {shown(value)} must be a number above 0")
            return default
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.fields.get(name, default)
        if not isinstance(value, bool):
            self.refuse(f"{name} {shown(value)} must be true or false")
        return bool(value)


def shown(value: Any) -> str:
    """Return a value as it may stand in a sentence."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
