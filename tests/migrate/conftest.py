"""Packages to migrate, what they find in `_mapped` then, and arrays as a record has them."""

import pathlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from jax_dist.migrate import helper_module
from jax_dist.migrate.verify.evidence import Array


@pytest.fixture(scope="session", autouse=True)
def helpers() -> Iterator[None]:
    module = types.ModuleType("_mapped")
    text = helper_module.module(helper_module.functions() | {"full"})
    exec(compile(text, "_mapped.py", "exec"), module.__dict__)
    sys.modules["_mapped"] = module
    yield
    del sys.modules["_mapped"]


@pytest.fixture
def kept(tmp_path: pathlib.Path) -> Callable[..., Array]:
    """Makes an array as a record has it, with its values."""

    def keep(values: object, dtype: str = "float32", **more: Any) -> Array:
        archive = tmp_path / f"{len(list(tmp_path.iterdir()))}.npz"
        array = np.array(values, dtype)
        np.savez(archive, x=array)
        given = {"path": "", "dtype": dtype, "devices": 8, "parts": 8, **more}
        return Array(shape=array.shape, archive=archive, key="x", **given)

    return keep


@pytest.fixture
def package(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder with a package `pkg`, and the current one."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "pkg"
    folder.mkdir()
    (folder / "__init__.py").touch()
    return folder


@pytest.fixture
def src(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A package in `src`, with tests beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src" / "mine").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    for name in ("pyproject.toml", "src/mine/__init__.py"):
        (tmp_path / name).touch()
    return tmp_path
