"""The sandbox in which chat templates run."""

import json
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from expertflow.data.watched import note_reading


class _Generation(jinja2.ext.Extension):
    """Let templates mark the assistant's text; the marks are not needed here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        """Parse the block and give what is inside."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def chat_environment() -> ImmutableSandboxedEnvironment:
    """Make the sandbox in which templates of tokenizers expect to run.

    It has no clock on purpose: a template that writes today's date would give other data every day.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )

    def tojson(value: Any, indent: int | None = None, **options: Any) -> str:
        note_reading(value)
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment
