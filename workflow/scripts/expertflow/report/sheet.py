"""What all pages share: the templates, their filters, and one style sheet."""

from collections.abc import Callable
from functools import cache, partial
from inspect import isfunction
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from msgspec.structs import asdict

from expertflow.core.format import show_hidden
from expertflow.report import ablation_facts
from expertflow.report import format as f
from expertflow.report.learned import format_difference, format_interval
from expertflow.report.measured import NO_REASON, NOT_MEASURED, Missing, is_measured

TEMPLATES = Path(__file__).with_name("templates")
N_ROWS = 60  # longer tables end with a reference to the JSON next to the page
N_CHARS = 1_200
UNITS = {
    "steps": f.count, "tokens": f.short, "tokens/s": f.short, "h": f.hours, "usd": f.usd,
    "bytes": f.size,
}  # fmt: skip
FILTERS: dict[str, Callable[..., Any]] = {
    # Each function of format.py is a filter of the same name.
    **{name: write for name, write in vars(f).items() if isfunction(write)},
    "text": str,
    "repr": repr,
    "fields": asdict,
    "ratio_interval": ablation_facts.format_interval,
    "bare_factor": ablation_facts.bare_factor,
    "in_format": lambda value, name: getattr(f, name)(value),
    "in_unit": lambda value, unit: UNITS[unit](value),
    "difference": format_difference,
    "interval": format_interval,
    "clip": lambda text, n=N_CHARS: f.clip(str(text), n),
    "clip_middle": lambda text, n=N_CHARS: f.clip_middle(text, n),
}


def _show(write: Callable[..., Any], value: Any, *more: Any, blank: str = NOT_MEASURED) -> Any:
    """Write a figure; a missing one as ``blank``, with its reason as a tooltip."""
    if is_measured(value):
        return write(value, *more)
    reason = value.reason if isinstance(value, Missing) else NO_REASON
    return Markup('<span class="na" title="{}">{}</span>').format(show_hidden(reason), blank)


@cache
def templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        # Only values come here. Markup, our own SVG, is a subclass of str and passes unchanged.
        finalize=lambda value: show_hidden(value) if type(value) is str else value,
        # A misspelled field stops the rendering, instead of leaving an empty cell.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Every filter handles missing values, so templates need not check.
    environment.filters |= {name: partial(_show, write) for name, write in FILTERS.items()}
    environment.tests["measured"] = is_measured
    environment.globals["n_rows"] = N_ROWS
    return environment


def render(template: str, **values: Any) -> str:
    style = Markup((TEMPLATES / "style.css").read_text(encoding="utf-8"))
    return templates().get_template(template).render(style=style, **values)
