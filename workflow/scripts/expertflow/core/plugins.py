"""Find classes in a folder, so that adding one takes a new file and no line elsewhere."""

import importlib
import pkgutil


def import_members(package: str) -> list[type]:
    """Import the modules in a package's folder; return the classes that they define, by module.

    ``config/code_digest.py`` counts these modules as imports, so ``package`` is a literal.
    """
    classes: list[type] = []
    for found in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        module = importlib.import_module(found.name)
        defined = (value for value in vars(module).values() if isinstance(value, type))
        classes += [one for one in defined if one.__module__ == found.name]
    return classes
