"""Migrated programs find their helpers in a module `_mapped`."""

import os
import pathlib
import sys
import types
from collections.abc import Iterator

import pytest

from jax_dist.codemod import helper_module


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder that all workers of this run have."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base


@pytest.fixture(scope="session", autouse=True)
def helpers() -> Iterator[None]:
    module = types.ModuleType("_mapped")
    text = helper_module.module(helper_module.functions() | {"full"})
    exec(compile(text, "_mapped.py", "exec"), module.__dict__)
    sys.modules["_mapped"] = module
    yield
    del sys.modules["_mapped"]
