"""A Python in which some packages look uninstalled."""

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

BARE = """
import sys
from importlib.machinery import PathFinder

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else super().find_spec(name, path, target)

ABSENT = sys.argv.pop(1).split(",")
sys.meta_path = [Bare if finder is PathFinder else finder for finder in sys.meta_path]
"""


RUN = 'import runpy; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name="__main__")'


def bare_python(folder: Path, absent: Iterable[str]) -> Path:
    """Write a program that runs a script like Python."""
    path = folder / "bare_python"
    command = shlex.join([sys.executable, "-c", BARE + RUN, ",".join(absent)])
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o755)
    return path
