"""Options of sources, and of reading a local source's files."""

import codecs
import csv
from typing import Literal, Self

from msgspec import ValidationError, convert
from msgspec.structs import force_setattr

from expertflow.core.errors import ConfigError
from expertflow.core.records import Record

# Longer records are rejected unread: too long to train on.
MAX_RECORD_BYTES = 64 << 20
# JSON and Python escapes, which some encodings would resolve.
_PROBE = bytes(range(128)).replace(b"\\", b"") + rb"\n\u0041"


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

    encoding: str = "utf-8"
    text_records: Literal["file", "paragraph", "line"] = "file"
    delimiter: str | None = None

    def __post_init__(self) -> None:
        # Normalized, since readers compare it with "utf-8".
        force_setattr(self, "encoding", _encoding(self.encoding))
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


def _encoding(name: str) -> str:
    """Return an encoding's canonical name if it preserves ASCII, hence line ends."""
    try:
        plain = codecs.lookup(name).name
        if plain in ("utf-8", "utf-8-sig"):
            return "utf-8"
        # False for UTF-16, for EBCDIC, and where a line end may be a character's second byte.
        kept = _PROBE.decode(plain) == _PROBE.decode("ascii") and all(
            "\n" in bytes([lead, 10, 65, 65]).decode(plain, "replace") for lead in range(128, 256)
        )
    except LookupError as error:
        raise ConfigError(f"options.encoding: {name!r} is unknown; use utf-8 or cp1252") from error
    except UnicodeError:
        kept = False
    if not kept:
        raise ConfigError(
            f"options.encoding: {name!r} does not preserve line ends; convert the file,"
            f" e.g. iconv -f {name} -t UTF-8"
        )
    return plain
