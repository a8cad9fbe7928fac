"""What did not compile is not tried again in later runs, unless somebody asks; and only that."""

import itertools
import json
import pathlib
import re
import subprocess
import sys
import textwrap
import time

import cache_runs
import jax
import pytest
from cache_runs import forking_python

from jax_dist import _compat, cache
from jax_dist.cache import failures, recorder
from jax_dist.errors import FailedBeforeError

_PROGRAM = pathlib.Path(__file__).with_name("programs") / "failing_program.py"


def _run(folder, *more, **variables):
    ended = forking_python().program(_PROGRAM, str(folder), *more, **variables)
    assert ended.code == 0, ended.err
    return ended.out


def test_a_failure_is_skipped_in_the_next_run_and_tried_if_asked(tmp_path):
    first = _run(tmp_path)
    second = _run(tmp_path)
    retried = _run(tmp_path, JAX_DIST_RETRY_FAILED="1")
    asked = _run(tmp_path, "retry")

    assert first.count("RuntimeError: NOT_FOUND: No FFI handler registered") == 2
    text = second.split("FailedBeforeError: ")[1]
    assert re.sub(r"on .* UTC|after \d+\.\d s|knows on .*", "T", text) == (
        "jit_step is not compiled:\n"
        "  * T it failed, T: "
        "NOT_FOUND: No FFI handler registered for nobody_T\n"
        "Because the same program, for the same devices, flags and custom calls, fails again.\n"
        "Change it; or set JAX_DIST_RETRY_FAILED=1, or enable(retry=True), to try again. "
        "`jax-dist cache failures` lists them all.\n"
    )
    assert second.count("FailedBeforeError") == 2
    assert "FailedBeforeError" not in retried + asked
    (failure,) = failures.ls(tmp_path)
    assert failure.function == "jit_step"
    assert failure.under["custom call nobody_knows"] == "not registered"
    assert failures.clear(tmp_path, function="jit_other") == 0
    assert failures.clear(tmp_path) == 1
    assert failures.ls(tmp_path) == []
    assert "FailedBeforeError" not in _run(tmp_path)


def test_what_compiles_by_now_is_not_refused(tmp_path):
    first = _run(tmp_path, "untyped")
    flags = _run(tmp_path, "untyped", XLA_FLAGS="--xla_dump_hlo_as_text")  # in no key
    again = _run(tmp_path, "untyped")
    registered = _run(tmp_path, "registered")

    assert "NOT_FOUND" in first
    assert "FailedBeforeError" not in flags
    assert "NOT_FOUND" in flags
    assert "NOT_FOUND" in again  # what is known now was found under that flag
    assert registered == "compiled\ncompiled\n"
    assert failures.ls(tmp_path) == []


@pytest.fixture
def folder(tmp_path):
    yield pathlib.Path(cache.enable(tmp_path))
    cache.enable(None)


_NUMBERS = itertools.count(2.25)


def _note(folder, **changes):
    """A program, and a failure that is noted for it, under what this process runs with."""
    number = next(_NUMBERS)  # JAX remembers what it has compiled
    lowered = jax.jit(lambda x: x * number).lower(1.0)
    key = cache.key(lowered).name
    request = _compat.CompileRequest.of(lowered)
    under = recorder.circumstances(_compat.CompiledProgram(request.backend, request.module))
    note = {
        "function": "jit__lambda_",
        "key": key,
        "reason": "UNIMPLEMENTED: x",
        "seconds": 2.0,
        "at": "2026-01-01 00:00",
        "under": under,
    }
    (folder / f"{key}-failure").write_text(json.dumps(note | changes))
    return lowered


def test_what_is_noted_is_refused(folder):
    lowered = _note(folder)
    with pytest.raises(FailedBeforeError, match=r"on 2026-01-01 00:00 UTC it failed, after 2\.0 s"):
        lowered.compile()


@pytest.mark.parametrize(
    "changes",
    [
        {"under": {}},
        {"key": f"jit_other-{64 * 'a'}"},
        {"seconds": "x"},
        {"seconds": None},
        {"function": 1},
        {"times": 3},
        {"reason": ["UNIMPLEMENTED"]},
        {"under": "x"},
    ],
    ids=str,
)
def test_a_note_of_something_else_refuses_nothing(folder, changes):
    lowered = _note(folder, **changes)
    lowered.compile()

    assert failures.ls(folder) == []  # it compiled, so nothing is left


@pytest.mark.parametrize(
    "note",
    [b"", b"{", b"null", b"[1]", 100_000 * b"[", 2_000_000 * b" ", b"\xff\xfe\0", b'{"at": NaN}'],
    ids=["empty", "cut", "null", "list", "deep", "large", "not text", "no number"],
)
def test_a_note_that_cannot_be_read_is_none(folder, note):
    lowered = _note(folder)
    (path,) = folder.glob("*-failure")
    path.write_bytes(note)

    assert failures.ls(folder) == []
    lowered.compile()
    assert not path.exists()


def test_failures_can_be_left_out(tmp_path):
    folder = pathlib.Path(cache.enable(tmp_path, failures=False))
    try:
        _note(folder).compile()
    finally:
        cache.enable(None)


_CALLS_X = {"custom call x": "not registered"}


@pytest.mark.parametrize(
    ("reason", "under", "noted"),
    [
        ("INVALID_ARGUMENT: shapes differ", {}, True),
        ("UNIMPLEMENTED: no such operation", {}, True),
        ("UNIMPLEMENTED: no such operation", None, False),  # what it depends on cannot be told
        ("NOT_FOUND: No FFI handler registered for x", _CALLS_X, True),
        ("NOT_FOUND: No FFI handler registered for x", {"custom call x": "registered"}, False),
        ("NOT_FOUND: libdevice.10.bc", _CALLS_X, False),  # a file may come
        ("INTERNAL: Mosaic failed", {}, False),
        ("FAILED_PRECONDITION: not now", {}, False),
        ("INVALID_ARGUMENT: Out of memory allocating 7 bytes", {}, False),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes", {}, False),
        ("UNAVAILABLE: connection lost", {}, False),
        ("UNKNOWN: something", {}, False),
    ],
)
def test_only_what_comes_again_is_noted(tmp_path, reason, under, noted):
    error = jax.errors.JaxRuntimeError(reason)

    assert failures.note(tmp_path, "jit_step", "key", under, 1.0, error) is noted
    assert len(failures.ls(tmp_path)) == noted


def test_an_interrupt_is_never_noted(folder, monkeypatch):
    from jax._src import compiler

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(compiler, "backend_compile_and_load", interrupt)
    with pytest.raises(KeyboardInterrupt):
        jax.jit(lambda x: x * 2.125)(1.0)

    assert failures.ls(folder) == []


_SLOW = textwrap.dedent("""
    import itertools
    import sys
    import jax
    from jax_dist import cache

    jax.config.update("jax_platforms", "cpu")
    cache.enable(sys.argv[1])

    def slow(x, start):
        for i in range(40):
            x = jax.numpy.sin(x) @ x + start + i
        return x

    x = jax.ShapeDtypeStruct((8, 8), "float32")
    for number in itertools.count():  # until the signal comes, however late
        lowered = jax.jit(slow, static_argnums=1).lower(x, number)
        print("compiling", flush=True)
        lowered.compile()
""")


def test_a_real_interrupt_while_xla_compiles_is_not_noted(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", _SLOW, str(tmp_path)],
        env=cache_runs.environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.readline() == "compiling\n"
    time.sleep(0.3)
    process.send_signal(2)
    process.communicate(timeout=120)

    assert process.returncode != 0
    assert failures.ls(tmp_path) == []
