"""`jax_dist.plan`: what each strategy takes."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dist
from jax_dist._hlo import Collective, ProgramCost
from jax_dist._steps import MappedStep
from jax_dist.errors import ArgumentError
from jax_dist.plan import Plan, PlanRow, plan
from jax_dist.topology import Topology
from tests.array_classes import Counter

PARAMS = {"w": np.ones((64, 128), np.float32), "v": np.ones((128, 8), np.float32)}
BATCH = {"x": np.ones((4, 64), np.float32)}
STATE_BYTES, BATCH_BYTES = 4 * (64 * 128 + 128 * 8), 4 * 4 * 64
FOUR = ["jax.pmap", "replicated", "fsdp", "fsdp-regather"]
LIMIT = 16_911_433_728


def step(params, batch):
    loss = lambda params: jnp.mean((jnp.tanh(batch["x"] @ params["w"]) @ params["v"]) ** 2)
    value, gradient = jax.value_and_grad(loss)(params)
    gradient = jax.lax.pmean(gradient, "i")
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), jax.lax.pmean(value, "i")


def stacked(count, tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), tree)


def planned(function=None, slices=2, **options):
    function = function or jax.pmap(step, "i", donate_argnums=0)
    options = {"on": jax.devices(), **options}
    return plan(function, stacked(slices, PARAMS), stacked(slices, BATCH), **options)


def machine(name, memory):
    return Topology(name, tuple(jax.devices()), memory)


def test_each_strategy_is_compiled_and_measured(monkeypatch):
    monkeypatch.setattr(Topology, "hosts", 2)

    result = planned(strategies=[*FOUR, "hsdp"])

    rows = {row.strategy: row for row in result.rows}
    assert {name: row.program.argument_bytes for name, row in rows.items()} == {
        "jax.pmap": STATE_BYTES + BATCH_BYTES,
        "replicated": STATE_BYTES + BATCH_BYTES,
        "fsdp": STATE_BYTES // 8 + BATCH_BYTES,
        "fsdp-regather": STATE_BYTES // 8 + BATCH_BYTES,
        "hsdp": STATE_BYTES // 4 + BATCH_BYTES,  # over the 4 devices of a host
    }
    labels = {(row.machine, row.verdict) for row in result.rows}
    assert labels == {("8 cpu devices", "limit unknown")}
    assert rows["fsdp"].needed < rows["jax.pmap"].needed
    collectives = [(c.kind, c.axes, c.size) for c in rows["jax.pmap"].program.collectives]
    assert collectives == [("all-reduce", ("i",), 8)]


_MAPPED = {  # and the size of the mapped axis of its arguments
    "jax_dist.pmap": (jax_dist.pmap(step, "i", donate_argnums=0), 1),
    "jit of jax.pmap": (jax.jit(jax.pmap(step, "i", donate_argnums=0)), 64),
    "a caller": (lambda *args: jax.pmap(step, "i", donate_argnums=0)(*args), 1),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", _MAPPED)
def test_any_mapped_function_is_planned_for_as_many_devices_as_there_are(name):
    cost = lambda row: (row.needed, row.program.argument_bytes, row.program.collectives)

    result, expected = planned(*_MAPPED[name]), planned()

    assert [cost(row) for row in result.rows] == [cost(row) for row in expected.rows]


def test_axes_static_arguments_and_keywords_stay_what_they_are():
    def scaled(times, params, x, *, bias):
        return params + times * jax.lax.psum(x.sum() + bias.sum(), "i")

    mapped = jax.pmap(scaled, "i", in_axes=(None, None, 1), out_axes=None,
                      static_broadcasted_argnums=0)  # fmt: skip
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    found = MappedStep.find(mapped, (3, of(32, 64), of(5, 2, 7)), {"bias": of(2, 9)})

    assert [leaf.shape for leaf in found.slices] == [(32, 64), (5, 7), (9,)]
    assert [leaf.shape for leaf in found.leaves(8)] == [(32, 64), (5, 8, 7), (8, 9)]
    rows = plan(found, on=jax.devices()).rows
    assert [row.problem for row in rows] == [""] * 4
    assert rows[2].program.argument_bytes == 4 * (32 * 64 // 8 + 5 * 7 + 9)


@pytest.mark.parametrize(
    "mapping", [jax.pmap, jax_dist.pmap, lambda *args: jax.jit(jax.pmap(*args))]
)
def test_a_state_may_have_classes_that_make_arrays_of_numbers(mapping):
    mapped = mapping(lambda counter, x: (Counter(counter.low + 1), jax.lax.pmean(x, "i")), "i")

    rows = plan(mapped, Counter(jnp.arange(8)), jnp.ones((8, 2)), on=jax.devices()).rows

    assert [row.problem for row in rows] == [""] * 4


def test_a_step_without_a_state_has_no_sharded_strategy():
    mapped = jax.pmap(lambda x: jax.lax.pmean(x.sum(), "i"), "i")

    rows = plan(mapped, stacked(2, BATCH["x"]), on=jax.devices()).rows

    assert ["'<lambda>' carries no state" in row.problem for row in rows] == [False, *[True] * 3]


@pytest.mark.parametrize(
    ("options", "kind", "line"),
    [
        ({"strategies": ["fsdp-regater"]}, ArgumentError, "Did you mean fsdp-regather?"),
        ({"on": "v5:4x4"}, ValueError, "Did you mean v5e?"),
        ({"on": [3]}, ArgumentError, "on=3 is not a machine"),
        ({"function": lambda *args: args}, NotImplementedError, "'<lambda>' maps nothing"),
    ],
)
def test_what_cannot_be_planned(options, kind, line):
    with pytest.raises(kind, match=re.escape(line)):
        planned(**options)


TOO_LARGE = "(20.45G) exceeds available HBM (15.75G)."


@pytest.mark.parametrize(
    ("line", "fits", "verdict"),
    [(TOO_LARGE, False, "does NOT fit, by 5.0 GB"), ("INTERNAL: no", None, "INTERNAL: no")],
)
def test_a_program_that_the_compiler_rejects_is_a_row(line, fits, verdict, monkeypatch):
    def reject(self, options):
        raise jax.errors.JaxRuntimeError(f"{line}\nat line 3")

    monkeypatch.setattr(jax.stages.Lowered, "compile", reject)

    (row,) = planned(strategies=["fsdp"], on=[machine("v5e:16x16", LIMIT)]).rows

    assert (row.fits, row.verdict) == (fits, verdict)


@pytest.mark.parametrize(
    ("memory", "efforts"), [(None, [9]), (10**9, [9]), (10**5, [9, None])], ids=str
)
def test_a_quick_plan_compiles_in_full_what_comes_near_the_limit(memory, efforts, monkeypatch):
    levels, compile_ = [], jax.stages.Lowered.compile

    def watched(self, options):
        levels.append(options.get("optimization_level"))
        return compile_(self, options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", watched)

    (row,) = planned(strategies=["jax.pmap"], quick=True, on=[machine("a box", memory)]).rows

    assert (levels, row.is_quick) == (efforts, efforts == [9])
    assert ("about" in row.verdict) == (memory == 10**9)


def test_the_table_and_the_data():
    def row(machine, strategy, needed, runs="always"):
        reduced = Collective("all-reduce", ("i",), 16, 2, 64, 118e6, runs)
        cost = ProgramCost((reduced,), argument_bytes=377_600_000)
        return PlanRow(machine, strategy, LIMIT, needed, cost, 41.7)

    rows = (
        row("v5e:2x4", "jax.pmap", 906_200_000),
        row("v5e:2x4", "fsdp", 546_600_000, runs="in a loop of unknown length"),
        PlanRow("tiny", "jax.pmap", 500_000_000, 906_000_000, seconds=3.0),
        PlanRow("tiny", "replicated", problem="the step maps inside"),
    )
    result = Plan("step", (machine("v5e:2x4", LIMIT), machine("tiny", 500_000_000)), rows)

    lines = [" ".join(line.split()) for line in str(result).splitlines()]
    assert max(map(len, str(result).splitlines())) <= 80
    assert set(lines) >= {
        "v5e:2x4: 8 devices on 1 host, 16.9 GB for programs on each",
        "strategy on one device arguments peak sent compiled",
        "jax.pmap fits, 16.0 GB free 377.6 MB 906.2 MB 236.0 MB 42 s",
        "fsdp fits, 16.4 GB free 377.6 MB 546.6 MB >236.0 MB 42 s",
        "jax.pmap does NOT fit, by 406.0 MB 906.0 MB",
        "replicated the step maps inside",
    }
    data = json.loads(json.dumps(result.to_dict()))
    assert data["machines"][1] == {"name": "tiny", "devices": 8, "hosts": 1, "memory": 500_000_000}
    assert [row["fits"] for row in data["rows"]] == [True, True, False, None]
    assert data["rows"][0]["moved_bytes"] == 236e6


def test_explain_has_the_plan_of_a_machine():
    mapped = jax.pmap(lambda w, x: w - jax.lax.all_gather(x @ w, "i").mean(0), "i")
    args = (np.ones((3, 64, 64), np.float32), np.ones((3, 64, 64), np.float32))

    report = jax_dist.explain(mapped, *args, devices=jax.devices())

    assert [row.strategy for row in report.plan.rows] == FOUR
    assert [(c.kind, c.size) for c in report.before.collectives] == [("all-gather", 8)]
    assert [(c.kind, c.size) for c in report.after.collectives] == [("all-reduce", 8)]
    assert "fsdp-regather" in str(report)
    assert jax_dist.explain(mapped, *args).plan is None
