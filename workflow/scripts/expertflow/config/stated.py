"""Where the values of a manifest come from, as its author states it below ``origins``."""

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from expertflow.config.read_yaml import read_yaml, suggest
from expertflow.core.errors import ConfigError

WORDS = {
    "source": "the source system had it",
    "public": "a public recipe has it",
    "own": "chosen here",
}


def check_stated(manifest: dict[str, Any], *, where: str) -> None:
    """Refuse an origin of a key that the manifest does not set; ConfigError names a near key."""
    known = dict(_keys(manifest))
    for key in manifest.get("origins", {}):
        if key not in known:
            hint = suggest(key, known, "set it, or leave its origin out")
            raise ConfigError(f"{where}: origins names {key!r}, which is not set here; {hint}")


def stated_text(path: Path) -> str:
    """Format a manifest's stated origins; empty if there are none."""
    manifest = read_yaml(path)
    values = dict(_keys(manifest))
    lines = []
    for key, origin in manifest.get("origins", {}).items():
        words = f"{key} {values.get(key)}: {WORDS[origin['from']]}"
        words += f"; {origin['why']}" if origin.get("why") else ""
        lines.append(textwrap.fill(words, 98, subsequent_indent="    ", break_on_hyphens=False))
    return textwrap.indent("\n".join(lines), "  ")


def _keys(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """List all that is set, by dotted keys; an item of a list that has a name goes by it."""
    named = {}
    if isinstance(value, dict):
        named = value
    elif isinstance(value, list):
        named = {str(v["name"]): v for v in value if isinstance(v, dict) and "name" in v}
    for key, item in named.items():
        yield f"{place}{key}", item
        yield from _keys(item, f"{place}{key}.")
