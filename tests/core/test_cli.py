import errno

import pytest

from expertflow.core import cli
from expertflow.core.errors import ConfigError, DataError
from expertflow.staging.records import StageSpec


def failing(error: Exception) -> object:
    def main() -> None:
        raise error

    return main


def test_a_users_error_is_one_line() -> None:
    with pytest.raises(SystemExit, match=r"^error: a b$"):
        cli.run(failing(DataError("a\n  b")))  # type: ignore[arg-type]


def test_a_full_disk_names_the_file() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "results/x.arrow")
    with pytest.raises(SystemExit, match=r"results/x\.arrow: no space left; free some"):
        cli.run(failing(full))  # type: ignore[arg-type]


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        cli.run(failing(ZeroDivisionError()))  # type: ignore[arg-type]


def test_success_exits_with_0() -> None:
    with pytest.raises(SystemExit) as caught:
        cli.run(lambda: None)
    assert caught.value.code == 0


def test_a_spec_is_read_strictly() -> None:
    assert cli.spec_from_text(StageSpec, '{"scratch":null}') == StageSpec(scratch=None)
    with pytest.raises(DataError, match="spec: object contains unknown field x"):
        cli.spec_from_text(StageSpec, '{"scratch":null,"x":1}')
    with pytest.raises(ConfigError, match="not JSON"):
        cli.spec_from_text(StageSpec, "{")
