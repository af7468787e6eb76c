"""Put data into Markdown so that it stays text: no markup, no HTML, no row or line of its own."""

import html
import re
from collections.abc import Iterable, Sequence

_MARKUP = re.compile(r"([\\`*_\[\]{}|~#!$])")
# What makes the beginning of a line a list, a quote, a heading or a rule.
_OPENING = re.compile(r"^(?:([-+=>])|(\d+)([.)]))")


def plain(value: object) -> str:
    """Give a value as one line of Markdown that shows it as it is."""
    line = " ".join(str(value).split())
    return _MARKUP.sub(r"\\\1", html.escape(line, quote=False))


def paragraph(value: object) -> str:
    """Give a value as a paragraph of its own."""
    return _OPENING.sub(lambda m: f"\\{m[1]}" if m[1] else f"{m[2]}\\{m[3]}", plain(value))


def code(value: object) -> str:
    """Give a value as inline code, in as many backticks as it needs."""
    line = " ".join(str(value).split())
    longest = max((len(run) for run in re.findall("`+", line)), default=0)
    fence, blank = "`" * (longest + 1), " " if longest else ""
    # A bar ends a cell of a table even within code.
    return f"{fence}{blank}{line}{blank}{fence}".replace("|", "\\|")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lay out cells that are Markdown already; no table where there is no row."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    if not lines:
        return []
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *lines, ""]


def number(value: float | None, reason: str = "not measured") -> str:
    """Give four significant digits, or say why there are none."""
    return plain(reason) if value is None else f"{value:.4g}"


def interval(value: float | None, ci95: tuple[float, float] | None) -> str:
    """Give a value with its 95 % interval, where it has one."""
    if value is None or ci95 is None:
        return number(value)
    return f"{value:.4g} ({ci95[0]:.4g} to {ci95[1]:.4g})"
