"""The predicted key is the name of the file that JAX writes, in all eight components."""

import contextlib
import json
import pathlib
import threading

import jax
import jax.numpy as jnp
import pytest
from cache_runs import forking_python

from jax_dist import _compat
from jax_dist.cache import key
from jax_dist.cache.records import COMPONENTS

_PROGRAM = pathlib.Path(__file__).parent / "programs" / "predicted_keys.py"


def double(x):
    return 2 * x


def test_each_program_is_written_under_its_predicted_key(tmp_path):
    ran = forking_python().program(_PROGRAM, str(tmp_path / "cache"))

    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert sorted(found) == [
        "args",
        "donated",
        "grad_of_scan",
        "shard_mapped",
        "sharded",
        "static",
        "two_devices",
    ]
    for name, (predicted, compiled_before, written) in found.items():
        assert not compiled_before, name  # asking compiles nothing
        assert written == [predicted], name


def test_a_key_has_the_eight_components():
    assert tuple(key(jax.jit(double).lower(jnp.ones(3))).components) == COMPONENTS


def test_asking_leaves_the_program_to_be_compiled():
    lowered = jax.jit(double).lower(jnp.ones(3))
    key(lowered)

    assert lowered.compile()(jnp.ones(3)).tolist() == [2.0, 2.0, 2.0]


def test_a_static_argument_changes_the_computation_only():
    power = jax.jit(lambda x, n: x**n, static_argnums=1)

    three, four = (key(power.lower(jnp.ones(3), n)) for n in (3, 4))

    assert three.differing(four) == ("computation",)
    assert three.differing(three) == ()


def test_compiler_options_are_a_component_of_their_own():
    plain = key(jax.jit(double).lower(jnp.ones(3)))
    options = {"xla_cpu_enable_fast_math": True}
    fast = key(jax.jit(double, compiler_options=options).lower(jnp.ones(3)))

    assert fast.differing(plain) == ("compile_options",)


def test_it_prints_as_a_table():
    lines = str(key(jax.jit(double).lower(jnp.ones(3)))).splitlines()

    assert lines[0].startswith("jit_double-")
    assert [line[:21].strip() for line in lines[1:]] == list(COMPONENTS)
    assert {len(line) for line in lines[1:]} == {38}


def test_while_one_thread_asks_another_compiles():
    asking, compiled = threading.Event(), threading.Event()

    @contextlib.contextmanager
    def wait_for_the_other(request):
        if request.name == "jit_double":
            asking.set()
            assert compiled.wait(60)
        yield

    lowered = jax.jit(double).lower(jnp.ones(5))
    x = jnp.ones(7)
    with _compat.compiles_watched(wait_for_the_other):
        thread = threading.Thread(target=key, args=(lowered,))
        thread.start()
        assert asking.wait(60)
        tripled = jax.jit(lambda x: 3 * x)(x)
        compiled.set()
        thread.join()

    assert tripled.tolist() == [3.0] * 7


@pytest.mark.parametrize("loud", [False, True], ids=["quiet", "with logging at DEBUG"])
def test_asking_logs_no_more_than_jax_does(caplog, loud):
    if loud:
        caplog.set_level("DEBUG", logger="jax._src.cache_key")
    key(jax.jit(double).lower(jnp.ones(3)))

    said = [record for record in caplog.records if "get_cache_key hash of" in record.message]
    assert len(said) == (8 if loud else 0)
