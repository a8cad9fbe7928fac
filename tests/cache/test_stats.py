"""Counts of hits and misses, by function and by reason."""

import logging
import pathlib
import re

import jax
import numpy as np
import pytest
from jax._src.compilation_cache import compress_executable, decompress_executable

import jax_dist
from jax_dist import cache
from jax_dist._compat import CACHES_HOST_CALLBACKS

X = np.ones(3, np.float32)


@pytest.fixture
def folder(tmp_path):
    yield cache.enable(tmp_path)
    cache.enable(None)


def _run(name, factor):
    function = lambda x: x * factor
    function.__name__ = name
    return jax.jit(function)(X)


@pytest.mark.usefixtures("folder")
def test_requests_are_hits_and_misses_by_function():
    with cache.stats() as seen:
        for name, factor in (("step", 2.0), ("step", 2.0), ("step", 3.0), ("loss", 4.0)):
            _run(name, factor)

    assert (seen.requests, seen.hits, seen.misses, seen.written) == (4, 1, 3, 3)
    step = seen.functions["jit_step"]
    assert (step.requests, step.hits, step.misses, step.written) == (3, 1, 2, 2)
    assert str(seen) == (
        "function  requests  hits  misses  written  saved\n"
        "jit_step         3     1       2        2  0.0 s\n"
        "jit_loss         1     0       1        1  0.0 s\n"
        "all              4     1       3        3  0.0 s"
    )


@pytest.mark.usefixtures("folder")
def test_a_block_counts_what_happens_inside_of_it():
    before = cache.stats().requests
    failed = cache.stats()
    with pytest.raises(ZeroDivisionError), failed:
        1 / 0  # noqa: B018
    with cache.stats() as outer:
        _run("before", 2.5)
        with cache.stats() as inner:
            _run("inside", 2.5)
        _run("after", 2.5)

    assert list(outer.functions) == ["jit_before", "jit_inside", "jit_after"]
    assert list(inner.functions) == ["jit_inside"]
    assert failed.requests == 0
    assert cache.stats().requests == before + 3


@pytest.mark.usefixtures("folder")
def test_a_callback_is_written_if_jax_can():
    def step(x):
        jax.debug.callback(lambda: None)
        return x

    with cache.stats() as seen:
        jax.jit(step)(X)

    reason = f"it calls back into Python, which jax {jax.__version__} does not write"
    assert seen.unwritten == ({} if CACHES_HOST_CALLBACKS else {reason: 1})
    assert str(seen).endswith(
        "0.0 s" if CACHES_HOST_CALLBACKS else f"jit_step: 1 not written: {reason}"
    )


@pytest.mark.usefixtures("folder")
def test_a_failed_compilation_is_a_miss():
    result = jax.ShapeDtypeStruct(X.shape, X.dtype)
    with cache.stats() as seen, pytest.raises(jax.errors.JaxRuntimeError):
        jax.jit(lambda x: jax.ffi.ffi_call("no_such_target", result)(x))(X)

    assert seen.unwritten == {"compiling it failed": 1}


def test_every_program_is_one_line_and_saves_what_compiling_took(folder, caplog):
    with caplog.at_level(logging.INFO, logger="jax_dist.cache"):
        _run("slow", 8.0)
        (path,) = pathlib.Path(folder).glob("jit_slow-*-cache")
        program = decompress_executable(path.read_bytes())
        path.write_bytes(compress_executable((13).to_bytes(4, "big") + program[4:]))  # seconds
        with cache.stats() as seen:
            _run("slow", 8.0)

    assert 10 < seen.seconds_saved < 13
    lines = [re.sub(r"in \d+\.\d s", "in T s", record.getMessage()) for record in caplog.records]
    saved = f"{seen.seconds_saved:.1f}"
    assert lines == ["jit_slow: compiled in T s, written", f"jit_slow: from cache, saved {saved} s"]


@pytest.mark.usefixtures("folder")
def test_a_call_hits_what_pmap_compiled_from_shapes():
    def compile_and_call(call):
        step = jax_dist.pmap(lambda x: jax.lax.psum(x * 2, "i"), "i")
        with cache.stats() as seen:
            call(step)
        return seen.functions["jit__lambda"]

    lowered = compile_and_call(lambda f: f.lower(jax.ShapeDtypeStruct((8, 3), "f4")).compile())
    called = compile_and_call(lambda f: f(np.ones((8, 3), np.float32)))

    assert (lowered.hits, lowered.written) == (0, 1)
    assert (called.hits, called.misses) == (1, 0)
