"""Wrong programs that try to pass their tests: the blocks of cheats.ts, described there."""

import re
from pathlib import Path


def read_blocks(file: str) -> dict[str, str]:
    """Return the texts of a file in this folder by the lines of four slashes before them."""
    text = Path(__file__).with_name(file).read_text(encoding="utf-8")
    _, *blocks = re.split(r"^//// (.*)\n", text, flags=re.MULTILINE)
    return {
        head: f"{text.rstrip()}\n" for head, text in zip(blocks[::2], blocks[1::2], strict=True)
    }


TEXTS = read_blocks("cheats.ts")
TESTS = {head[6:]: text for head, text in TEXTS.items() if head.startswith("tests ")}


def cheats(tests: str) -> dict[str, str]:
    """Return the programs for these tests, by family and name."""
    found = {}
    for head, text in TEXTS.items():
        name, _, words = head.partition(" | ")
        of, *parts = words.split(", ")
        if of == tests:
            found[name] = "".join(TEXTS[f"part {part}"] for part in parts) + text
    return found
