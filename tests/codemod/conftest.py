"""Migrated programs find their helpers in a module `_mapped`."""

import sys
import types
from collections.abc import Iterator

import pytest

from jax_dist.codemod import helper_module


@pytest.fixture(scope="session", autouse=True)
def helpers() -> Iterator[None]:
    module = types.ModuleType("_mapped")
    text = helper_module.module(helper_module.functions() | {"full"})
    exec(compile(text, "_mapped.py", "exec"), module.__dict__)
    sys.modules["_mapped"] = module
    yield
    del sys.modules["_mapped"]
