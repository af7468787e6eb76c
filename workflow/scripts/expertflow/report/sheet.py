"""What all pages share: the templates, their filters, and one style sheet."""

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from expertflow.core.format import show_hidden
from expertflow.report import format as f

TEMPLATES = Path(__file__).with_name("templates")
N_ROWS = 60  # longer tables end with a hint at the JSON beside the page
N_CHARS = 1_200
N_DETAIL_CHARS = 300


def _shown(value: Any) -> Any:
    return show_hidden(value) if type(value) is str else value


@cache
def templates() -> Environment:
    """Open the templates, with escaping on and hidden characters shown in all of them."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = ("count", "number_of", "short", "percent", "tenths", "points", "loss", "usd",
             "duration", "size", "energy", "words", "plain", "signed", "sentence", "hold", "hours",
             "short_hash", "signed_percent", "usd_rate")  # fmt: skip
    environment.filters |= {name: getattr(f, name) for name in names}
    environment.filters["clip"] = lambda text: f.clip(str(text), N_CHARS)
    environment.filters["clip_short"] = lambda text: f.clip(str(text), N_DETAIL_CHARS)
    return environment


def style() -> Markup:
    """Read the style sheet that all pages carry inside."""
    return Markup((TEMPLATES / "style.css").read_text(encoding="utf-8"))


def trusted(chart: Any) -> dict[str, Any] | None:
    """Mark the drawings of a chart as safe; its title, unit and note are not."""
    if chart is None:
        return None
    return {
        "title": chart.title,
        "unit": chart.unit,
        "wide": Markup(chart.wide),
        "narrow": Markup(chart.narrow),
        "note": chart.note,
    }
