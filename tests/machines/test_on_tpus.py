"""Programs as the compiler of TPUs makes them, without one.

    pip install 'jax[tpu]'
    python -m pytest -m tpu_compiler --optimised

`-m gpu_compiler` does the same for H100s, with `jax[cuda12]`.
"""

import collections
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jax_dist
from jax_dist.errors import UnsupportedError
from jax_dist.machines.cost import collectives_of
from jax_dist.machines.plans import plan
from jax_dist.migrate.vendored.mapped import mapped

_BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
_TPUS = [pytest.param(name, marks=pytest.mark.tpu_compiler) for name in ("v5e:2x2", "v5e:4x4")]
_GPUS = [pytest.param(name, marks=pytest.mark.gpu_compiler) for name in ("h100:1x8", "h100:2x8")]
_MACHINES = [*_TPUS, pytest.param("v5p:2x2x2", marks=pytest.mark.tpu_compiler), *_GPUS]


@pytest.fixture
def programs(monkeypatch):
    monkeypatch.syspath_prepend(str(_BENCHMARKS))
    import machine_programs

    return machine_programs


def instructions(compiled):
    """Of the optimised program: no names, no lines of the source."""
    text = re.sub(r", metadata=\{[^}]*\}", "", compiled.as_text())
    lines = [line.strip() for line in text.splitlines() if " = " in line]
    return collections.Counter(re.sub(r"%[\w.\-]+", "%", line) for line in lines)


def kinds(compiled):
    """The collectives of a program."""
    found = collections.Counter()
    for each in collectives_of(compiled.as_text()):
        found[each.kind] += each.count
    return found


def _both(program, machine):
    types = program.mapped_types(len(machine.devices))
    options = {"axis_name": "i", "devices": machine.devices, **program.options}
    made = [
        way(program.fun, **options).lower(*types).compile() for way in (jax.pmap, jax_dist.pmap)
    ]
    return made[0], made[1]


@pytest.mark.parametrize("name", _MACHINES)
def test_twenty_programs_are_those_of_jax_pmap(name, programs):
    machine = jax_dist.topology(name)
    unlike = {}

    listed = programs.same_programs(len(machine.devices))
    for title, program in listed.items():
        theirs, ours = map(instructions, _both(program, machine))
        assert theirs
        if theirs != ours:
            unlike[title] = (theirs - ours, ours - theirs)

    assert len(listed) == 20
    assert not unlike


@pytest.mark.parametrize("name", [_TPUS[0], _TPUS[1], _GPUS[0]])
def test_a_gather_that_is_reduced_is_gone(name, programs):
    machine = jax_dist.topology(name)

    for program in programs.better_programs().values():
        theirs, ours = _both(program, machine)

        assert (kinds(theirs), kinds(ours)) == ({"all-gather": 1}, {"all-reduce": 1})
        before, after = (each.memory_analysis().peak_memory_in_bytes for each in (theirs, ours))
        assert after < 0.7 * before


@pytest.mark.parametrize("name", [_TPUS[0], _GPUS[0]])
def test_a_training_step_is_that_of_jax_pmap(name, programs):
    theirs, ours = _both(programs.transformer(programs.SMALL), jax_dist.topology(name))

    assert instructions(theirs) == instructions(ours)
    assert (
        ours.memory_analysis().alias_size_in_bytes == theirs.memory_analysis().alias_size_in_bytes
    )


@pytest.mark.parametrize("name", [_TPUS[1], _GPUS[1]])
def test_state_in_parts_takes_less_than_copies(name, programs):
    machine = jax_dist.topology(name)
    mlp = programs.same_programs(len(machine.devices))["SGD, donated"]
    wide = {"first": programs.of(2048, 2048), "bias": programs.of(2048),
            "last": programs.of(2048, 2048)}  # fmt: skip
    rows = programs.stacked(len(machine.devices), 0, programs.of(32, 2048))
    made = {
        way: jax_dist.global_view(
            mlp.fun, "i", out_axes=(None, 0), donate_argnums=0, mesh=Mesh(machine.devices, ("i",)),
            shardings=way,
        ).lower(wide, rows).compile()
        for way in ("replicated", "fsdp")
    }  # fmt: skip
    memory = {way: each.memory_analysis() for way, each in made.items()}

    assert memory["fsdp"].argument_size_in_bytes < memory["replicated"].argument_size_in_bytes / 8
    assert memory["fsdp"].peak_memory_in_bytes < memory["replicated"].peak_memory_in_bytes
    assert kinds(made["fsdp"])["all-gather"] <= 3  # of each leaf, once; GPUs join two of them
    assert kinds(made["fsdp"]).keys() <= {"all-gather", "all-reduce", "reduce-scatter"}


@pytest.mark.tpu_compiler
def test_what_is_scattered_takes_no_constants_without_a_layout():
    """4 KiB each: XLA counts with them where it makes a sum and a slice of a reduce-scatter."""
    machine = jax_dist.topology("v5e:16x16")
    step = lambda w, x: w - jax.lax.pmean(jnp.tanh(x @ w).T @ x, "i").T
    types = (jax.ShapeDtypeStruct((1024, 1024), "f4"), jax.ShapeDtypeStruct((256, 32, 1024), "f4"))
    view = jax_dist.global_view(step, "i", mesh=Mesh(machine.devices, ("i",)), shardings="fsdp")
    lowered = view.lower(*types)

    assert "reduce_scatter" not in lowered.as_text()
    assert not re.findall(r"u32\[\] constant\(", lowered.compile().as_text())


def _large_step(w, x):
    return w - jax.lax.pmean(jnp.sin(w) * x.sum(), "i")


@pytest.mark.tpu_compiler
def test_a_plan_says_which_way_fits_and_by_how_much():
    """State and gradient of 8 GiB each: a copy of both does not fit in 15.75 GiB, a part does."""
    types = (jax.ShapeDtypeStruct((4, 2**21, 1024), "f4"), jax.ShapeDtypeStruct((4, 8), "f4"))
    mapped = jax.pmap(_large_step, "i", donate_argnums=0)

    found = plan(mapped, *types, on="v5e:2x2", ways=["jax.pmap", "fsdp"])

    whole, parts = found.rows
    assert (whole.fits, whole.program, whole.needed) == (False, None, 16 * 2**30)
    assert whole.verdict == "does NOT fit, by 268.4 MB"
    assert (parts.fits, parts.needed) == (True, parts.program.peak_bytes)
    assert parts.program.argument_bytes == 2**31 + 512
    assert parts.program.alias_bytes == 2**31
    assert parts.program.cycles > 0
    assert found.advice.startswith("It fits on v5e:2x2 only as fsdp; ")


@pytest.mark.parametrize("name", [_TPUS[1], _GPUS[1]])
def test_a_plan_agrees_with_what_the_compiler_says(name, programs):
    machine = jax_dist.topology(name)
    program = programs.same_programs(len(machine.devices))["SGD, donated"]

    mapped = jax.pmap(program.fun, "i", donate_argnums=0)
    rows = plan(mapped, *program.mapped_types(len(machine.devices)), on=name).rows

    memory = _both(program, machine)[0].memory_analysis()
    assert [row.way for row in rows] == ["jax.pmap", "replicated", "fsdp", "fsdp-regather"]
    assert rows[0].program.argument_bytes == memory.argument_size_in_bytes
    assert rows[0].program.temp_bytes == memory.temp_size_in_bytes
    assert rows[0].needed == memory.peak_memory_in_bytes
    assert all(row.fits and row.memory == machine.memory for row in rows)
    assert {each.size for row in rows for each in row.program.collectives} == {16}


# ---- every way in, on four hosts

_TABLE = np.ones((128, 128), np.float32)


def _of_table(x):
    return jax.lax.pmean(x @ _TABLE, "i")


def _step(w, x):
    gradient = jax.grad(lambda w: jnp.mean((x @ _TABLE @ w) ** 2))(w)
    return w - 0.1 * jax.lax.pmean(gradient, "i")


_X = jax.ShapeDtypeStruct((16, 128), jnp.float32)
_W = jax.ShapeDtypeStruct((128, 128), jnp.float32)
_ENTRIES = {
    "pmap": lambda on: jax_dist.pmap(_of_table, "i", devices=on.devices).lower(_X),
    "pmap, whole arrays": lambda on: jax_dist.pmap(
        _of_table, "i", devices=on.devices, arrays="global"
    ).lower(_X),
    "pmap in pmap": lambda on: jax_dist.pmap(
        jax_dist.pmap(lambda x: jax.lax.psum(x, ("i", "j")), "j"), "i", devices=on.devices
    ).lower(jax.ShapeDtypeStruct((8, 2, 128), jnp.float32)),
    "a scan of pmap": lambda on: jax.jit(
        lambda x: jax.lax.scan(
            lambda x, _: (jax_dist.pmap(_of_table, "i", devices=on.devices)(x), None), x, length=3
        )[0]
    ).lower(_X),
    "the gradient of pmap": lambda on: jax.jit(
        jax.grad(lambda x: (jax_dist.pmap(_of_table, "i", devices=on.devices)(x) ** 2).sum())
    ).lower(_X),
    "filter_pmap": lambda on: jax_dist.filter_pmap(
        _of_table, axis_name="i", devices=on.devices
    ).lower(_X),
    "mapped": lambda on: mapped(_of_table, "i", devices=on.devices).lower(_X),
    "rewrite": lambda on: jax_dist.rewrite(
        jax.jit(jax.pmap(_of_table, "i", devices=on.devices))
    ).lower(_X),
    "rewrite of ours": lambda on: jax_dist.rewrite(
        jax_dist.pmap(_of_table, "i", devices=on.devices)
    ).lower(_X),
    "global view": lambda on: jax_dist.global_view(
        _step, "i", mesh=Mesh(on.devices, ("i",)), shardings="fsdp"
    ).lower(_W, jax.ShapeDtypeStruct((16, 4, 128), jnp.float32)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::jax_dist.errors.CapturedArrayWarning")
@pytest.mark.parametrize("entry", _ENTRIES)
@pytest.mark.parametrize("name", [_TPUS[1], _GPUS[1]])
def test_programs_for_several_hosts_come_out_of_one_process(entry, name):
    machine = jax_dist.topology(name)
    assert (jax.process_count(), machine.hosts > 1) == (1, True)

    compiled = _ENTRIES[entry](machine).compile()

    sizes = {each.size for each in collectives_of(compiled.as_text())}
    assert sizes == {16}


@pytest.mark.parametrize("name", [_TPUS[1], _GPUS[1]])
def test_a_call_there_is_one_clear_error(name):
    machine = jax_dist.topology(name)

    with pytest.raises(UnsupportedError, match="cannot run on these devices, which only compile"):
        jax_dist.pmap(_of_table, "i", devices=machine.devices)(np.ones((16, 128), np.float32))


@pytest.mark.parametrize(
    ("name", "count", "hosts", "gib"),
    [
        ("v4:2x2x1", 4, 1, 30.75),
        ("v5e-16", 16, 4, 15.75),
        ("v6e:1x1", 1, 1, 31.25),
        ("v5p:2x2x2", 8, 2, 95.74),
        ("v7x:2x2x1", 8, 1, 94.75),
    ],
)
@pytest.mark.tpu_compiler
def test_the_memory_of_a_chip_is_what_its_compiler_allows(name, count, hosts, gib):
    machine = jax_dist.topology(name)
    too_large = jax.ShapeDtypeStruct((1, 2**16, 2**10, 2**10), jnp.float32)  # 256 GiB

    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        jax.pmap(jnp.cumsum, devices=machine.devices[:1]).lower(too_large).compile()

    assert (len(machine.devices), machine.hosts) == (count, hosts)
    assert re.search(r"exceeds available HBM \((\S+)G\)", str(raised.value))[1] == f"{gib:.2f}"
    assert machine.memory == round(gib * 2**30)
