"""Opening a bundle and a run that makes the same expert keep off each other."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from expertflow.core.errors import ConfigError
from expertflow.core.locks import EXPERT_LOCKS, holder, sign, try_lock


@contextlib.contextmanager
def only_one(directory: Path, expert: str) -> Iterator[None]:
    """Hold an expert of a working directory as long as the block takes.

    Raises:
        ConfigError: a run makes it, or another opening is at work.
    """
    path = directory / EXPERT_LOCKS / f"{expert}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as stream:
        held = try_lock(stream) == "held"
        known = holder(stream)
        if held:
            who = f", process {known['pid']} on {known['host']}" if known else ""
            raise ConfigError(
                f"{directory / 'results' / expert}: is being made by another run{who}; wait for it,"
                " or stop it"
            )
        # What else a run has written there, the next one reads.
        sign(stream, **known)
        yield
