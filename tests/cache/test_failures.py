"""What did not compile is not tried again in later runs, unless somebody asks; and only that."""

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

from jax_dist import cache
from jax_dist._errors import FailedBeforeError
from jax_dist.cache import failures, ledger

# XLA knows no such handler, and says so when it compiles.
_PROGRAM = textwrap.dedent("""
    import sys
    import jax
    import numpy as np
    from jax_dist import cache

    jax.config.update("jax_platforms", "cpu")
    cache.enable(sys.argv[1], retry=len(sys.argv) > 2)

    @jax.jit
    def step(x):
        return jax.ffi.ffi_call("nobody_knows", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    for _ in range(2):
        try:
            step(np.ones(3, np.float32))
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)
""")


def _run(folder, *more, **variables):
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(folder), *more],
        env=cache_runs.environment(**variables),
        text=True,
        capture_output=True,
        timeout=120,
        check=True,
    )
    return ran.stdout


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
        "Because the same program, for the same devices and flags, fails again.\n"
        "Change it; or, if what it needs is there now, set JAX_DIST_RETRY_FAILED=1, or "
        "enable(retry=True). `jax-dist cache failures` lists them all.\n"
    )
    assert second.count("FailedBeforeError") == 2
    assert "FailedBeforeError" not in retried + asked
    (failure,) = failures.ls(tmp_path)
    assert (failure.function, failure.times) == ("jit_step", 3)  # runs, not calls
    assert failures.clear(tmp_path, function="jit_other") == 0
    assert failures.clear(tmp_path) == 1
    assert failures.ls(tmp_path) == []
    assert "FailedBeforeError" not in _run(tmp_path)


@pytest.fixture
def folder(tmp_path):
    yield pathlib.Path(cache.enable(tmp_path))
    cache.enable(None)


def _step(x):
    return x * 2.25


def _note(folder, name, reason, times=1):
    lowered = jax.jit(_step).lower(1.0)
    key = cache.key(lowered).name
    note = {"function": name, "key": key, "reason": reason, "seconds": 2.0, "times": times}
    (folder / f"{key}-failure").write_text(json.dumps(note | {"at": "2026-01-01 00:00"}))
    return lowered


def test_what_xla_calls_internal_counts_from_the_second_run_on(folder):
    _note(folder, "jit__step", "INTERNAL: ptxas fell over", times=2)
    with pytest.raises(FailedBeforeError, match=r"on 2026-01-01 00:00 UTC it failed, after 2\.0 s"):
        jax.jit(_step).lower(1.0).compile()


def test_what_compiles_after_all_is_forgotten(folder):
    lowered = _note(folder, "jit__step", "INTERNAL: ptxas fell over")
    lowered.compile()

    assert failures.ls(folder) == []


def test_a_note_that_cannot_be_read_is_none(folder):
    lowered = _note(folder, "jit__step", "NOT_FOUND: x")
    (note,) = folder.glob("*-failure")
    note.write_text("{")
    lowered.compile()

    assert failures.ls(folder) == []


def test_failures_can_be_left_out(tmp_path):
    folder = pathlib.Path(cache.enable(tmp_path, failures=False))
    try:
        _note(folder, "jit__step", "NOT_FOUND: x").compile()
    finally:
        cache.enable(None)


@pytest.mark.parametrize(
    ("reason", "noted"),
    [
        ("INVALID_ARGUMENT: shapes differ", True),
        ("UNIMPLEMENTED: no such operation", True),
        ("INTERNAL: Mosaic failed", True),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes", False),
        ("INTERNAL: RESOURCE_EXHAUSTED: out of memory", False),
        ("UNAVAILABLE: connection lost", False),
        ("DEADLINE_EXCEEDED: too slow", False),
        ("CANCELLED: by the user", False),
        ("INTERNAL: No space left on device", False),
        ("UNKNOWN: something", False),
    ],
)
def test_only_what_comes_again_is_noted(tmp_path, reason, noted):
    error = jax.errors.JaxRuntimeError(reason)

    assert ledger.note(tmp_path, "jit_step", "key", 1.0, error, again=False) is noted
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
