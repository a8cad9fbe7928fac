"""The verdict on the key, held against the programs that two fresh processes make."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist._rewrite.report import CacheVerdict

pytestmark = pytest.mark.rewriting

_X = np.arange(12.0, dtype=np.float32).reshape(4, 3)


def _mesh(name="i"):
    return Mesh(np.array(jax.devices()[:4]), (name,), axis_types=(AxisType.Auto,))


def _over(name):
    body = lambda x: jax.lax.psum(x, name)
    return jax.shard_map(body, mesh=_mesh(name), in_specs=P(name), out_specs=P())


def _named(fun, name):
    fun.__name__ = name
    return fun


def _centre(x):
    @custom_partitioning
    def centre(x):
        return x - x.mean(-1, keepdims=True)

    centre.def_partition(
        partition=lambda mesh, args, result: (
            mesh,
            centre.fun,
            result.sharding,
            (args[0].sharding,),
        ),
        sharding_rule="i j -> i j",
    )
    return centre(x)


def _inner(name):
    inner = jax.jit(_named(lambda x: x.sum(0), name))
    return lambda x: inner(x) + inner(x + 1)


def _spread():
    return jax.device_put(_X, NamedSharding(_mesh(), P("i")))


def _stable() -> dict[str, jax.stages.Lowered]:
    return {
        "plain": jax.jit(lambda x: {"a": x * 2, "b": x + 1}).lower(_X),
        "shard_map": jax.jit(_over("i")).lower(_X),
        "pmap": jax.jit(jax.pmap(lambda x: x * 2)).lower(_X),
        "long names": jax.jit(_named(lambda x: x, "deadbeef_1234567_facade")).lower(_X),
        "partitioned by one device": jax.jit(_centre).lower(_X),
        "numbers in the program": jax.jit(lambda x: x * 123456789.0 + 0x7F3A12).lower(_X),
        "a name in a scope": jax.jit(jax.named_scope(f"at {id(_X)}")(jnp.sin)).lower(_X),
    }


def _unstable() -> dict[str, jax.stages.Lowered]:
    return {
        "custom_partitioning": jax.jit(_centre).lower(_spread()),
        "program name": jax.jit(_named(lambda x: x, f"f_{id(_X)}")).lower(_X),
        "inner name": jax.jit(_inner(f"g_{hex(id(_X))}")).lower(_X),
        "axis name": jax.jit(_over(f"axis{id(_X)}")).lower(_X),
        "result name": jax.jit(lambda x: {f"at {hex(id(_X))}": x, "b": x}).lower(_X),
    }


def print_programs() -> None:
    """Runs in fresh processes."""
    programs = {name: lowered.as_text() for name, lowered in (_stable() | _unstable()).items()}
    json.dump(programs, sys.stdout)


def _programs_of_a_fresh_process(hash_seed: str) -> dict[str, str]:
    code = (
        "from jax_dist.testing import simulated_devices; simulated_devices(8); "
        "import test_stability; test_stability.print_programs()"
    )
    here = pathlib.Path(__file__)
    paths = os.pathsep.join(map(str, (here.parent, here.parents[2])))
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": paths}
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return json.loads(run.stdout)


@pytest.mark.thorough
def test_the_verdict_is_what_two_fresh_processes_say():
    first, second = _programs_of_a_fresh_process("1"), _programs_of_a_fresh_process("2")

    same = {name: first[name] == second[name] for name in first}
    judged = {
        name: CacheVerdict.of(lowered).stable for name, lowered in (_stable() | _unstable()).items()
    }

    assert [name for name, is_same in same.items() if is_same] == list(_stable())
    assert judged == same


def test_a_stable_program_has_no_causes():
    for name, lowered in _stable().items():
        assert CacheVerdict.of(lowered) == CacheVerdict(stable=True, causes=()), name


@pytest.mark.parametrize(
    ("lower", "what", "name"),
    [
        (
            lambda: jax.jit(_named(lambda x: x, "f_0x7f3a12345678")).lower(_X),
            "the program",
            "jit_f_0x7f3a12345678",
        ),
        (
            lambda: jax.jit(_inner("g140384429020112")).lower(_X),
            "an inner function",
            "g140384429020112",
        ),
        (
            lambda: jax.jit(_over("i_6f9619ff-8b86-d011-b42d-00c04fc964ff")).lower(_X),
            "a mesh axis",
            "i_6f9619ff-8b86-d011-b42d-00c04fc964ff",
        ),
        (
            lambda: jax.jit(lambda x: {"run_1732000000": x}).lower(_X),
            "a result",
            "result['run_1732000000']",
        ),
    ],
)
def test_a_made_up_name_is_said_with_its_place(lower, what, name):
    assert CacheVerdict.of(lower()).causes == (
        f"The name of {what}, {name!r}, looks made from an address, an id or a time, which differ "
        "in each process. Give it a fixed name.",
    )


def _calling_back():
    shape = jax.ShapeDtypeStruct((4, 3), jnp.float32)
    prints = lambda x: (jax.debug.print("{}", x[0, 0]), x)[1]
    return {
        "pure_callback": lambda x: jax.pure_callback(np.asarray, shape, x),
        "io_callback": lambda x: io_callback(np.asarray, shape, x),
        "ordered": lambda x: io_callback(np.asarray, shape, x, ordered=True),
        "debug.print": prints,
        "in shard_map": jax.shard_map(
            prints, mesh=_mesh(), in_specs=P("i"), out_specs=P("i"), check_vma=False
        ),
    }


_CASES = ("pure_callback", "io_callback", "ordered", "debug.print", "in shard_map")


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="jax writes them to the cache")
@pytest.mark.parametrize("case", _CASES)
def test_callbacks_are_never_written(case):
    assert CacheVerdict.of(jax.jit(_calling_back()[case]).lower(_X)).causes == (
        "It calls back into Python (debug.print, pure_callback, io_callback), and this jax, "
        f"{jax.__version__}, never writes such a program. Take the callback out, or use jax 0.12 "
        "or later.",
    )


def test_what_is_captured_is_named():
    lowered = jax.jit(lambda x: x).lower(_X)

    assert CacheVerdict.of(lowered, ("W",)).causes == (
        "W is part of the program, so the key depends on the values: random ones differ in each "
        "process. Pass arrays as arguments, or let rewrite lift them (captures='lift').",
    )
    assert (
        CacheVerdict.of(lowered, ("W", "self.b")).causes[0].startswith("W, self.b are part of the")
    )
