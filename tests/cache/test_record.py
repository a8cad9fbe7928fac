"""What is written down of each program, what is left out, and how it survives a crash."""

import json
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_runs import forking_python

from jax_dist.cache.recorder import operations_of
from jax_dist.cache.records import load

_OUTCOMES = """
import json, os, pathlib, sys, threading, warnings
warnings.simplefilter("ignore")
import jax, numpy as np
from jax_dist.cache import recorder, records

folder, cache, own = map(pathlib.Path, sys.argv[1:])
folder.mkdir()
jax.config.update("jax_compilation_cache_dir", str(own))
recorder.start(str(folder), str(cache))
found, seen = {}, 0

def fates(name, run):
    global seen
    jax.clear_caches()
    run()
    fresh = records.load(folder)[seen:]
    seen += len(fresh)
    found[name] = [each.fate for each in fresh]

def again():
    jax.jit(lambda x: x + 1)(np.ones(3))

def in_threads():
    functions = [jax.jit(lambda x, n=n: x + n) for n in range(2, 6)]
    threads = [threading.Thread(target=each, args=(np.ones(3),)) for each in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

def broken():
    shape = jax.ShapeDtypeStruct((3,), np.float32)
    try:
        jax.jit(lambda x: jax.ffi.ffi_call("no_such_target", shape)(x))(np.ones(3, np.float32))
    except jax.errors.JaxRuntimeError as error:
        found["raised"] = "no_such_target" in str(error)

fates("first", again)
fates("second", again)
fates("of all threads", in_threads)
fates("broken", broken)
entry = cache / f"{records.load(folder)[0].key}-cache"
entry.write_bytes(b"damaged")
fates("damaged", again)
entry.unlink()
entry.mkdir()
(entry / "file").touch()
fates("cannot be written", lambda: jax.jit(lambda x: x + 9)(np.ones(3)))
jax.config.update("jax_enable_compilation_cache", False)
jax.experimental.compilation_cache.compilation_cache.reset_cache()
fates("off", again)
found["own directory"] = [str(own)] == sorted({each.directory for each in records.load(folder)})
found["left alone"] = jax.config.jax_compilation_cache_dir == str(own) and not own.exists()
json.dump(found, sys.stdout)
"""


def _program(text, folder, *arguments):
    file = folder / "program.py"
    file.write_text(text)
    return forking_python().program(file, *map(str, arguments))


def test_what_became_of_each_program(tmp_path):
    folders = tmp_path / "records", tmp_path / "cache", tmp_path / "own"
    ran = _program(_OUTCOMES, tmp_path, *folders)

    assert ran.code == 0, ran.err
    assert json.loads(ran.out) == {
        "first": ["written"],
        "second": ["hit"],
        "of all threads": ["written"] * 4,
        "broken": [],
        "raised": True,
        "damaged": ["written"],
        "cannot be written": ["written"],
        "off": ["cache-off"],
        "own directory": True,
        "left alone": True,
    }


_KILLED = """
import os, pathlib, signal, sys
import jax, numpy as np
from jax_dist.cache import recorder
folder = pathlib.Path(sys.argv[1])
folder.mkdir(exist_ok=True)
recorder.start(str(folder), sys.argv[1] + "-cache")
jax.jit(lambda x: x + np.random.default_rng(0).random((500, 1000), np.float32)[0])(np.ones(1000))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_folder_keeps_what_was_compiled_before_a_crash_and_is_small(tmp_path):
    for _ in range(2):
        assert _program(_KILLED, tmp_path, tmp_path / "records").code == -signal.SIGKILL

    kept = load(tmp_path / "records")
    assert [each.function for each in kept] == ["jit__lambda"] * 2
    files = list((tmp_path / "records").iterdir())
    assert len(files) == 2
    assert max(file.stat().st_size for file in files) < 20_000


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
    module = jax.jit(lambda: jnp.asarray(table)).lower().compiler_ir()
    constants = [
        each
        for each in operations_of(module)
        if each.kind == "stablehlo.constant" and "x" in each.attributes["value"].split()[0]
    ]
    return constants[0].attributes["value"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"key": 1}', 100_000 * "["], ids=str.__len__)
def test_what_is_no_record_is_refused(tmp_path, text):
    (tmp_path / "run.json").write_text(text)

    with pytest.raises(ValueError, match=r"run\.json is not a record of this version of jax_dist"):
        load(tmp_path)
