"""Find modules and classes in a folder, so that adding one takes a new file and nothing else.

``config/code_digest.py`` counts these modules as imports, so ``package`` is a literal.
"""

import importlib
import pkgutil


def list_modules(package: str) -> list[str]:
    """Return the names of the modules in a package's folder, without importing them."""
    return [found.name for found in pkgutil.iter_modules(importlib.import_module(package).__path__)]


def import_members(package: str) -> list[type]:
    """Import the modules in a package's folder; return the classes that they define, by module."""
    classes: list[type] = []
    for found in pkgutil.iter_modules(importlib.import_module(package).__path__):
        module = importlib.import_module(f"{package}.{found.name}")
        defined = (value for value in vars(module).values() if isinstance(value, type))
        classes += [one for one in defined if one.__module__ == module.__name__]
    return classes
