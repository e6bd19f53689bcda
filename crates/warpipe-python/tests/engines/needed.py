"""The packages of engines: `cargo xtask engines` installs them, and other runs leave these tests out."""

import importlib
import os

import pytest


def needed(name):
    """Imports a module of an engine's package."""
    if "WARPIPE_TEST_ENGINES" in os.environ:
        return importlib.import_module(name)
    return pytest.importorskip(name, reason=f"cargo xtask engines installs it: {name}")
