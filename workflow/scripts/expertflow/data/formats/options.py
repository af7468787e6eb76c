"""Options of sources, and of reading a local source's files."""

import csv
from typing import Literal, Self

from msgspec import ValidationError, convert

from expertflow.core.errors import ConfigError
from expertflow.core.records import Record

# Longer records are rejected unread: too long to train on.
MAX_RECORD_BYTES = 64 << 20


class SourceOptions(Record, frozen=True, kw_only=True):
    @classmethod
    def from_manifest(cls, options: dict[str, object]) -> Self:
        """Check a source's options; ConfigError for an unknown or unusable one."""
        known = cls.__struct_fields__
        if unknown := sorted(map(str, set(options) - set(known))):
            fix = f"use {', '.join(known)}" if known else "this kind of source has no options"
            raise ConfigError(f"options.{unknown[0]}: unknown; {fix}")
        try:
            return convert({k: value for k, value in options.items() if value is not None}, cls)
        except ValidationError as error:
            problem, _, place = str(error).replace("`", "").partition(" - at $.")
            key = place.partition("[")[0]
            raise ConfigError(
                f"options.{key}: {options[key]!r} is not valid: {problem[0].lower()}{problem[1:]}"
            ) from error


class ReadOptions(SourceOptions, frozen=True, kw_only=True):
    """Options of a local source. A null ``delimiter`` is a comma in .csv and a tab in .tsv."""

    text_records: Literal["file", "line"] = "file"
    delimiter: str | None = None

    def __post_init__(self) -> None:
        try:
            csv.reader([], delimiter=self.delimiter or ",")
            usable = self.delimiter is None or self.delimiter.isascii()
        except (TypeError, ValueError):
            usable = False
        if not usable or self.delimiter in ('"', "\r", "\n", ""):
            raise ConfigError(
                f"options.delimiter: {self.delimiter!r} is not one character, such as ';'"
            )

    @classmethod
    def select_known(cls, options: dict[str, object]) -> "ReadOptions":
        """Select the reading options; other kinds of source have different ones."""
        known = cls.__struct_fields__
        return cls.from_manifest({key: options[key] for key in options if key in known})
