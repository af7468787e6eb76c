"""One guard at a time works in a folder: a second one would stop the machine under the first."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from expertflow.core.errors import ConfigError
from expertflow.core.locks import try_lock


@contextmanager
def only_guard(own: Path) -> Iterator[None]:
    """Hold a folder of the guard's for a block, and for as long as what it started runs.

    Raises:
        ConfigError: another guard holds it.
    """
    path = own / "lock"
    try:
        own.mkdir(parents=True, exist_ok=True)
        stream = path.open("a")
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written ({error.strerror}); see to --state"
        ) from error
    with stream:
        if try_lock(stream) == "held":
            raise ConfigError(
                f"{path}: another guard, or what it started, is at work in this folder;"
                " wait for it, or stop it"
            )
        yield
