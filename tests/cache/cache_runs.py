"""Runs `cached_program.py` in fresh processes, and damages what they wrote."""

import json
import os
import pathlib
import random
import subprocess
import sys
import zlib
from collections.abc import Mapping
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = pathlib.Path(__file__).with_name("cached_program.py")


def environment(**more: str) -> dict[str, str]:
    """That of a user who set nothing."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "XLA_", "PYTHON"))
    }
    return inherited | {"PYTHONPATH": str(ROOT)} | more


def command(folder: pathlib.Path, python: str = sys.executable, **options: Any) -> list[str]:
    return [python, str(PROGRAM), json.dumps({"folder": str(folder), **options})]


def start(
    folder: pathlib.Path, variables: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(folder, **options),
        env=environment(**(variables or {})),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def run(folder: pathlib.Path, **options: Any) -> dict[str, Any]:
    """One process, from its start to its end: `folder`, `hits`, `values`, `said`."""
    return finish(start(folder, **options))


def entry_of(folder: pathlib.Path, function: str) -> pathlib.Path:
    """The one entry of a function, in a cache or in a part of it."""
    (found,) = folder.rglob(f"jit_{function}-*-cache")
    return found


def _random(data: bytes) -> bytes:
    return random.Random(0).randbytes(len(data))


def _half_a_program(data: bytes) -> bytes:
    program = zlib.decompress(data)
    return zlib.compress(program[: len(program) // 2])


DAMAGES = {  # of bytes, by the function whose entry suffers it
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "random_bytes": _random,
    "half_a_program": _half_a_program,
    "no_program": lambda data: zlib.compress(b"abcd"),
}


def damage_all(folder: pathlib.Path) -> None:
    """Each function's entry in its own way."""
    for function, damage in DAMAGES.items():
        path = entry_of(folder, function)
        path.write_bytes(damage(path.read_bytes()))
