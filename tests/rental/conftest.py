"""Fixtures for tests that copy: places of every kind."""

from stores import object_storage, place

__all__ = ["object_storage", "place"]
