"""A Python in which packages are not installed: whoever asks whether they are is told so."""

import sys
from collections.abc import Iterable

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


def bare_python(absent: Iterable[str], code: str, *words: object) -> list[str]:
    """Return the command that runs code, which finds the words behind its ``sys.argv[0]``."""
    return [sys.executable, "-c", BARE + code, ",".join(absent), *map(str, words)]
