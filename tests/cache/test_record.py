"""What `record` writes down, what it leaves out, and how it survives a crash."""

import json
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_runs import forking_python

from jax_dist import _compat
from jax_dist.cache.recorder import operations_of, record
from jax_dist.cache.records import Record

_OUTCOMES = """
import json, os, sys
import warnings
warnings.simplefilter("ignore")
import jax, numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax_dist.cache.recorder import record

cache = sys.argv[1]
jax.config.update("jax_compilation_cache_dir", cache)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

def step(x):
    return x + 1

def told(recorder):
    return [(each.outcome.value, each.reason) for each in recorder.record.compiles]

def again():
    jax.clear_caches()
    with record() as recorder:
        jax.jit(step)(np.ones(3))
    return told(recorder)

found = {"first": again(), "second": again()}
with record() as outer:
    again()
found["around another recorder"] = told(outer)
[entry] = [name for name in os.listdir(cache) if name.endswith("-cache")]
with open(os.path.join(cache, entry), "wb") as file:
    file.write(b"damaged")
found["damaged"] = again()
os.remove(os.path.join(cache, entry))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 1000.0)
found["quick"] = again()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_compilation_cache_dir", None)
compilation_cache.reset_cache()
found["off"] = again()
file = cache + "-file"
open(file, "w").close()
jax.config.update("jax_compilation_cache_dir", file)
compilation_cache.reset_cache()
found["directory is a file"] = again()
json.dump(found, sys.stdout)
"""


def _program(text, folder, *arguments):
    file = folder / "program.py"
    file.write_text(text)
    return forking_python().program(file, *map(str, arguments))


def test_what_became_of_each_program(tmp_path):
    ran = _program(_OUTCOMES, tmp_path, tmp_path / "cache")

    assert ran.code == 0, ran.err
    assert json.loads(ran.out) == {
        "first": [["written", None]],
        "second": [["hit", None]],
        "around another recorder": [["hit", None]],
        "damaged": [["not written", "damaged-entry"]],
        "quick": [["not written", "threshold"]],
        "off": [["not written", "cache-off"]],
        "directory is a file": [["not written", "write-failed"]],
    }


_KILLED = """
import os, signal, sys
import jax, numpy as np
from jax_dist.cache.recorder import record
record(sys.argv[1]).start()
jax.jit(lambda x: x + 1)(np.ones(3))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_folder_keeps_what_was_compiled_before_a_crash(tmp_path):
    for _ in range(2):
        assert _program(_KILLED, tmp_path, tmp_path / "records").code == -signal.SIGKILL

    kept = Record.load(tmp_path / "records")
    assert [each.key.function for each in kept.compiles] == ["jit__lambda"] * 2
    assert len(list((tmp_path / "records").iterdir())) == 2


def test_a_file_holds_the_same_as_the_recorder(tmp_path):
    with record(tmp_path / "run.json") as recorder:
        jax.jit(lambda x: {"sum": x.sum(), "sine": jnp.sin(x)})(np.ones((2, 3), np.float32))
        jax.jit(lambda x: x @ x.T + 1j)(jnp.ones((2, 3)))

    assert Record.load(tmp_path / "run.json") == recorder.record
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_after_stop_nothing_is_recorded():
    recorder = record()
    recorder.start()
    jax.jit(lambda x: x + 1)(np.ones(3))
    recorder.stop()
    jax.jit(lambda x: x + 2)(np.ones(3))

    assert len(recorder.record.compiles) == 1


def test_two_recorders_do_not_disturb_each_other():
    with record() as outer:
        with record() as inner:
            jax.jit(lambda x: x + 1)(np.ones(3))
        jax.jit(lambda x: x + 2)(np.ones(3))

    assert (len(outer.record.compiles), len(inner.record.compiles)) == (2, 1)


def test_a_program_that_does_not_compile_raises_what_it_raised():
    def broken(x):
        return jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct((3,), jnp.float32))(x)

    with record() as recorder, pytest.raises(jax.errors.JaxRuntimeError):
        jax.jit(broken)(np.ones(3, np.float32))
    jax.jit(lambda x: x + 1)(np.ones(3))

    assert recorder.record.compiles == ()


def test_programs_of_all_threads_are_recorded():
    functions = [jax.jit(lambda x, n=n: x + n) for n in range(4)]
    with record() as recorder:
        threads = [threading.Thread(target=each, args=(np.ones(3),)) for each in functions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert len({each.key.name for each in recorder.record.compiles}) == 4


def test_a_large_array_does_not_make_a_large_record(tmp_path):
    table = np.random.default_rng(0).random((2500, 1000), np.float32)  # 10 MB
    with record(tmp_path / "run.json"):
        jax.jit(lambda x: x + table)(np.ones(1000, np.float32))

    assert (tmp_path / "run.json").stat().st_size < 20_000


@pytest.mark.parametrize(
    ("table", "text"),
    [
        (np.arange(4, dtype=np.float32), " = 0, 1, 2, ..."),
        (np.arange(2, dtype=np.int32) - 1, " = -1, 0"),
        (np.array([True, False, True]), ""),
        (jnp.arange(4, dtype=jnp.bfloat16), ""),
        (np.array([1j, 2], np.complex64), ""),
        (np.full((2, 3), 0.5, np.float32), " = 5.000000e-01"),
        (np.array([np.inf, np.nan], np.float32), " = inf, nan"),
    ],
    ids=lambda value: str(getattr(value, "dtype", "")),
)
def test_an_array_in_a_program_is_its_type_a_hash_and_a_few_numbers(table, text):
    first, other = (_value_of(values) for values in (table, table[::-1] * 1))
    type_, digest, *numbers = first.split(" ", 2)

    assert type_.startswith(f"tensor<{'x'.join(map(str, table.shape))}x")
    assert len(digest) == 32
    assert ("".join(f" {number}" for number in numbers)) == text
    assert (first == other) == (len(set(np.asarray(table).ravel().tolist())) == 1)


def _value_of(table):
    request = _compat.CompileRequest.of(jax.jit(lambda: jnp.asarray(table)).lower())
    constants = [
        each
        for each in operations_of(request.module)
        if each.kind == "stablehlo.constant" and "x" in each.attributes["value"].split()[0]
    ]
    return constants[0].attributes["value"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 1}',
        '{"format": 99, "compiles": []}',
        '{"format": null}',
        '{"format": 1, "texts": [], "compiles": [1]}',
        100_000 * "[",
    ],
    ids=lambda text: text[:20],
)
def test_what_is_no_record_is_refused(tmp_path, text):
    (tmp_path / "run.json").write_text(text)

    with pytest.raises(ValueError, match=r"run\.json is not a record of jax_dist\.cache\.record"):
        Record.load(tmp_path / "run.json")


def test_a_record_of_another_format_is_refused_by_its_number(tmp_path):
    (tmp_path / "run.json").write_text('{"format": 99, "compiles": [], "texts": []}')

    with pytest.raises(ValueError, match="its format is 99, and this version reads 1"):
        Record.load(tmp_path / "run.json")


def test_a_compilation_is_recorded_once_also_if_another_library_hooks_in(monkeypatch):
    with record() as recorder:
        hooked = jax._src.compiler.compile_or_get_cached
        monkeypatch.setattr(jax._src.compiler, "compile_or_get_cached", lambda *args: hooked(*args))
        with record():
            jax.jit(lambda x: x + 1)(np.ones(3))

    assert len(recorder.record.compiles) == 1


def test_an_empty_folder_is_an_empty_record(tmp_path):
    assert str(Record.load(tmp_path)) == "nothing was compiled"
