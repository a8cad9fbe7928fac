"""What the cache did, counted by function and by reason."""

import logging
import pathlib
import re
import threading
import zlib

import jax
import numpy as np
import pytest

from jax_dist import cache
from jax_dist._compat import CACHES_HOST_CALLBACKS


@pytest.fixture
def folder(tmp_path):
    yield cache.enable(tmp_path)
    cache.enable(None)


def _named(name, factor):
    function = lambda x: x * factor
    function.__name__ = name
    return function


X = np.ones(3, np.float32)


@pytest.mark.usefixtures("folder")
def test_misses_are_requests_without_hits():
    with cache.stats() as seen:
        jax.jit(_named("step", 2.0))(X)
        jax.jit(_named("step", 2.0))(X)
        jax.jit(_named("step", 3.0))(X)
        jax.jit(_named("loss", 4.0))(X)

    assert (seen.requests, seen.hits, seen.misses, seen.written) == (4, 1, 3, 3)
    step, loss = seen.functions["jit_step"], seen.functions["jit_loss"]
    assert (step.requests, step.hits, step.misses, step.written) == (3, 1, 2, 2)
    assert (loss.requests, loss.hits, loss.misses, loss.written) == (1, 0, 1, 1)
    assert seen.seconds_saved == 0.0  # JAX notes whole seconds
    assert str(seen) == (
        "function  requests  hits  misses  written  saved\n"
        "jit_step         3     1       2        2  0.0 s\n"
        "jit_loss         1     0       1        1  0.0 s\n"
        "all              4     1       3        3  0.0 s"
    )


@pytest.mark.usefixtures("folder")
def test_only_what_happens_inside_is_counted():
    with cache.stats() as outer:
        jax.jit(_named("before", 2.5))(X)
        with cache.stats() as inner:
            jax.jit(_named("inside", 2.5))(X)
        jax.jit(_named("after", 2.5))(X)

    assert list(outer.functions) == ["jit_before", "jit_inside", "jit_after"]
    assert list(inner.functions) == ["jit_inside"]


@pytest.mark.usefixtures("folder")
def test_without_a_block_it_is_the_whole_process():
    before = cache.stats().requests
    jax.jit(_named("process", 2.75))(X)

    assert cache.stats().requests == before + 1


@pytest.mark.usefixtures("folder")
def test_a_block_that_raises_stops_counting():
    seen = cache.stats()
    with pytest.raises(ZeroDivisionError), seen:
        1 / 0  # noqa: B018
    jax.jit(_named("after", 2.875))(X)

    assert seen.requests == 0


@pytest.mark.usefixtures("folder")
def test_other_threads_are_counted():
    with cache.stats() as seen:
        threads = [
            threading.Thread(target=lambda factor=factor: jax.jit(_named("step", factor))(X))
            for factor in (10.0, 11.0, 12.0)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert seen.functions["jit_step"].written == 3


@pytest.mark.usefixtures("folder")
def test_a_callback_is_never_written_before_jax_0_12():
    def step(x):
        jax.debug.callback(lambda: None)
        return x

    with cache.stats() as seen:
        jax.jit(step)(X)

    if CACHES_HOST_CALLBACKS:
        assert seen.unwritten == {}
    else:
        reason = f"it calls back into Python, which jax {jax.__version__} does not write"
        assert seen.unwritten == {reason: 1}
        assert str(seen).splitlines()[-1] == f"jit_step, 1 time not written: {reason}"


@pytest.mark.usefixtures("folder")
def test_what_does_not_compile_is_a_miss():
    result = jax.ShapeDtypeStruct(X.shape, X.dtype)
    with cache.stats() as seen, pytest.raises(jax.errors.JaxRuntimeError):
        jax.jit(lambda x: jax.ffi.ffi_call("no_such_target", result)(x))(X)

    assert (seen.misses, seen.written) == (1, 0)
    assert seen.unwritten == {"compiling it failed": 1}


def test_without_a_folder_that_is_the_reason():
    with cache.stats() as seen:
        jax.jit(_named("step", 5.0))(X)

    assert seen.unwritten == {"there is no cache directory": 1}


def test_jax_own_store_is_counted_too(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    reset = jax.experimental.compilation_cache.compilation_cache.reset_cache
    reset()
    try:
        with cache.stats() as seen:
            jax.jit(_named("step", 6.0))(X)
            jax.jit(_named("step", 6.0))(X)
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
        reset()

    assert (seen.hits, seen.misses, seen.written) == (1, 1, 1)


@pytest.mark.usefixtures("folder")
def test_every_compile_is_one_line(caplog):
    with caplog.at_level(logging.INFO, logger="jax_dist.cache"):
        jax.jit(_named("step", 7.0))(X)
        jax.jit(_named("step", 7.0))(X)

    lines = [re.sub(r"in \d+\.\d s", "in T s", record.getMessage()) for record in caplog.records]
    assert lines == ["jit_step: compiled in T s, written", "jit_step: from cache, saved 0.0 s"]
    assert {record.levelname for record in caplog.records} == {"INFO"}


def test_saved_seconds_are_those_of_compiling(folder, caplog):
    jax.jit(_named("slow", 8.0))(X)
    (path,) = pathlib.Path(folder).glob("jit_slow-*-cache")
    program = zlib.decompress(path.read_bytes())
    path.write_bytes(zlib.compress((13).to_bytes(4, "big") + program[4:]))  # as if it had taken 13
    with caplog.at_level(logging.INFO, logger="jax_dist.cache"), cache.stats() as seen:
        jax.jit(_named("slow", 8.0))(X)

    assert 10 < seen.seconds_saved < 13
    assert (
        caplog.records[0].getMessage() == f"jit_slow: from cache, saved {seen.seconds_saved:.1f} s"
    )


@pytest.mark.usefixtures("folder")
def test_for_machines():
    with cache.stats() as seen:
        jax.jit(_named("step", 9.0))(X)
    counts = seen.to_dict()["total"]
    counts.pop("seconds_compiling")

    assert list(seen.to_dict()["functions"]) == ["jit_step"]
    assert counts == {
        "requests": 1,
        "hits": 0,
        "misses": 1,
        "written": 1,
        "unwritten": {},
        "seconds_saved": 0.0,
    }
