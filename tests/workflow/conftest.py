"""Fixtures for workflow tests: a finished run, and copies of it to edit."""

from workflow_space import finished, space

__all__ = ["finished", "space"]
