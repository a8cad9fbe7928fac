"""Runs `cached_program.py` in processes of its own, and damages what they wrote."""

import atexit
import functools
import json
import os
import pathlib
import random
import subprocess
import sys
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = pathlib.Path(__file__).with_name("cached_program.py")
_FORKING = pathlib.Path(__file__).with_name("forking_python.py")


def environment(**more: str) -> dict[str, str]:
    """That of a user who set nothing."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "XLA_", "PYTHON"))
    }
    return inherited | {"PYTHONPATH": str(ROOT)} | more


class Ended(NamedTuple):
    code: int
    out: str
    err: str


class ForkingPython:
    """Has imported jax, and runs programs in forks, one after the other."""

    def __init__(self, *around: str):
        """`around` is a command that starts it, such as unshare."""
        # Forks copy one thread, so there must be no other; BLAS would start some.
        self._process = subprocess.Popen(
            [*around, sys.executable, str(_FORKING)],
            env=environment(OPENBLAS_NUM_THREADS="1"),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> "ForkingPython":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def program(self, file: pathlib.Path, *arguments: str, **variables: str) -> Ended:
        return self._asked(program=[str(file), *arguments], variables=variables)

    def shell(self, script: str) -> Ended:
        return self._asked(shell=script)

    def _asked(self, **request: Any) -> Ended:
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Ended(**json.loads(self._process.stdout.readline()))


@functools.cache
def forking_python() -> ForkingPython:
    """One for all the tests of this process."""
    started = ForkingPython()
    atexit.register(started.__exit__)
    return started


def _arguments(folder: pathlib.Path, options: Mapping[str, Any]) -> str:
    return json.dumps({"folder": str(folder), **options})


def start(
    folder: pathlib.Path, variables: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[str]:
    """In a process that forks from no other."""
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), _arguments(folder, options)],
        env=environment(**(variables or {})),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=120)
    return said(Ended(process.returncode, out, err))


def run(
    folder: pathlib.Path, python: ForkingPython | None = None, **options: Any
) -> dict[str, Any]:
    """One process, from its start to its end: `folder`, `hits`, `values`, `said`."""
    return said(ended(folder, python, **options))


def ended(folder: pathlib.Path, python: ForkingPython | None = None, **options: Any) -> Ended:
    """One that may be killed."""
    return (python or forking_python()).program(PROGRAM, _arguments(folder, options))


def said(process: Ended) -> dict[str, Any]:
    assert process.code == 0, process.err
    return json.loads(process.out.splitlines()[-1])


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
