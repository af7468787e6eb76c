"""What every script shares: one line for an error, one sidecar for an output."""

import argparse
import errno
import json
import logging
import os
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from expertflow.core.errors import ConfigError, ExpertflowError
from expertflow.core.files import sha256_file, sha256_text
from expertflow.core.records import from_json, write_record

T = TypeVar("T")


def parser(description: str | None, *, by_hand: bool = False) -> argparse.ArgumentParser:
    """Make the argument parser of a stage's script: every stage has a spec and a code digest.

    What may be run ``by_hand`` does without a spec.
    """
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument(
        "--spec", required=not by_hand, default="{}", help="settings of the stage, as JSON"
    )
    result.add_argument("--code", default="", help="digest of the stage's code, kept in sidecars")
    return result


class _Without(MetaPathFinder):
    """Says of one package that it is not installed."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == self.package:
            raise ModuleNotFoundError(f"{fullname} is not used in this job", name=fullname)


def without_pandas() -> None:
    """Keep pyarrow from importing pandas, as it does with the first array that it makes.

    That takes 0.25 s and 50 MB, and the jobs that call this have no use for it.
    """
    sys.meta_path.insert(0, _Without("pandas"))


def spec_from_text(cls: type[T], text: str) -> T:
    """Read a stage's settings from its ``--spec`` argument."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--spec is not JSON ({error}): {text:.60}") from error
    result: T = from_json(cls, value, where="spec")
    return result


def run(main: Callable[[], None], *, by_bus: bool = True) -> NoReturn:
    """Run a script's main function; turn a user's error into one line on stderr and exit code 1.

    ``by_bus``: CUDA counts cards as the driver does, unless the user's environment says otherwise.
    """
    if by_bus:
        # Else it counts by speed, and the card watched is not the one in use. Before CUDA starts.
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        main()
    except ExpertflowError as error:
        sys.exit(_one_line(str(error)))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        place = error.filename or "the output's file system"
        sys.exit(_one_line(f"{place}: no space left; free some, or move results/ to another disk"))
    sys.exit(0)


def write_sidecar(output: Path, *, spec: str, code: str) -> None:
    """Note beside an output what it was made from, so that a copy can be verified anywhere."""
    sidecar: dict[str, Any] = {
        "rule": Path(sys.argv[0]).stem,
        "output": output.name,
        "sha256": sha256_file(output),
        "spec_sha256": sha256_text(spec),
        "code": code,
    }
    write_record(output.with_name(f".{output.name}.fingerprint"), sidecar)


def _one_line(message: str) -> str:
    return "error: " + " ".join(message.split())
