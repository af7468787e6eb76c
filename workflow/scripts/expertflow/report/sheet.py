"""What all pages share: the templates, their filters, and one style sheet."""

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from expertflow.core.format import show_hidden
from expertflow.report import format as f

TEMPLATES = Path(__file__).with_name("templates")
N_ROWS = 60  # longer tables end with a reference to the JSON beside the page
N_CHARS = 1_200
N_DETAIL_CHARS = 300
N_NAME_CHARS = 160
FILTERS = (
    "count", "number_of", "short", "percent", "tenths", "points", "loss", "usd", "duration", "size",
    "energy", "words", "plain", "signed", "sentence", "hold", "hours", "short_hash",
    "signed_percent", "usd_rate", "short_time", "calls",
)  # fmt: skip


@cache
def templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=lambda value: show_hidden(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {name: getattr(f, name) for name in FILTERS}
    for name, n_chars in (
        ("clip", N_CHARS), ("clip_short", N_DETAIL_CHARS), ("clip_name", N_NAME_CHARS),
    ):  # fmt: skip
        environment.filters[name] = lambda text, n_chars=n_chars: f.clip(str(text), n_chars)
    return environment


def render(template: str, **values: Any) -> str:
    style = Markup((TEMPLATES / "style.css").read_text(encoding="utf-8"))
    written = lambda value, show: getattr(f, show)(value)  # noqa: E731
    return templates().get_template(template).render(
        style=style, n_rows=N_ROWS, written=written, **values
    )  # fmt: skip
