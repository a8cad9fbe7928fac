"""`jax_dist.plan`: what each strategy takes, and the step that a program calls."""

import contextlib
import functools
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dist
from jax_dist._hlo import Collective, ProgramCost
from jax_dist._steps import MappedStep, find_step
from jax_dist.errors import ArgumentError
from jax_dist.plan import Plan, PlanRow, plan
from jax_dist.topology import Topology

N = jax.local_device_count()
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


# What each strategy takes.


def test_each_strategy_is_compiled_and_measured():
    result = planned()

    rows = {row.strategy: row for row in result.rows}
    whole, sharded = STATE_BYTES + BATCH_BYTES, STATE_BYTES // 8 + BATCH_BYTES
    sizes = {strategy: row.program.argument_bytes for strategy, row in rows.items()}
    assert sizes == dict(zip(FOUR, [whole, whole, sharded, sharded], strict=True))
    assert {(row.machine, row.verdict) for row in result.rows} == {
        ("8 cpu devices", "limit unknown")
    }
    assert rows["fsdp"].needed < rows["jax.pmap"].needed
    assert [(c.kind, c.axes, c.size) for c in rows["jax.pmap"].program.collectives] == [
        ("all-reduce", ("i",), 8)
    ]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("wrap", "slices"),
    [
        (lambda _: jax_dist.pmap(step, "i", donate_argnums=0), 1),
        (jax.jit, 64),
        (lambda mapped: lambda *args: mapped(*args), 1),
    ],
    ids=["jax_dist.pmap", "jit of jax.pmap", "a caller"],
)
def test_any_mapped_function_is_planned_for_as_many_devices_as_there_are(wrap, slices):
    mapped = wrap(jax.pmap(step, "i", donate_argnums=0))

    rows, expected = planned(mapped, slices).rows, planned().rows

    for row, other in zip(rows, expected, strict=True):
        assert (row.needed, row.program.collectives) == (other.needed, other.program.collectives)
        assert row.program.argument_bytes == other.program.argument_bytes


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


def test_a_step_without_a_state_has_no_sharded_strategy():
    mapped = jax.pmap(lambda x: jax.lax.pmean(x.sum(), "i"), "i")

    rows = plan(mapped, stacked(2, BATCH["x"]), on=jax.devices()).rows

    assert ["'<lambda>' carries no state" in row.problem for row in rows] == [False, *[True] * 3]


def test_hsdp_shards_the_state_over_the_devices_of_a_host(monkeypatch):
    monkeypatch.setattr(Topology, "hosts", 2)

    (row,) = planned(strategies=["hsdp"]).rows

    assert row.program.argument_bytes == STATE_BYTES // 4 + BATCH_BYTES


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


# The step of a program.


def rows_of(count):
    return np.ones((N, count, 8), np.float32)


def train_step(weights, batch):
    gradient = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(weights)
    return weights - jax.lax.pmean(gradient, "i"), batch.sum()


def init(key):
    return jax.random.normal(key, (8,))


def train(pmap, calls):
    """Count devices, make a state and make it the same everywhere, before training."""
    assert pmap(lambda x: jax.lax.psum(x, "i"), "i")(jnp.ones(N))[0] == N
    weights = pmap(init)(jax.random.split(jax.random.key(0), N))
    weights = pmap(lambda x: jax.lax.pmean(x, "i"), "i")(weights)
    mapped = pmap(train_step, axis_name="i", donate_argnums=0)
    while True:
        weights, _ = mapped(weights, rows_of(3))
        calls.append(weights)


@pytest.mark.parametrize("package", [jax, jax_dist], ids=lambda package: package.__name__)
def test_the_first_that_takes_its_result_and_a_batch_is_the_step(package):
    calls, before = [], (jax.pmap, jax_dist.pmap)

    found = find_step(lambda: train(package.pmap, calls))

    assert (found.name, found.state(N), found.options.donated) == ("train_step", (0,), (0,))
    assert calls == []
    assert [leaf.shape for leaf in found.slices] == [(8,), (3, 8)]
    assert find_step(lambda: train(package.pmap, []), "init").name == "init"
    assert (jax.pmap, jax_dist.pmap) == before


def test_a_method_is_found_in_a_program_that_catches_everything():
    def run():
        class Trainer:
            @functools.partial(jax.pmap, axis_name="i", static_broadcasted_argnums=0)
            def step(self, weights, batch):
                return weights - jax.lax.pmean(batch.sum(), "i")

        with contextlib.suppress(BaseException):
            Trainer().step(jnp.ones((N, 2)), rows_of(1))

    found = find_step(run)

    assert (found.name, [leaf.shape for leaf in found.slices]) == ("step", [(2,), (1, 8)])


def fail():
    jax.pmap(init)(jax.random.split(jax.random.key(0), N))
    raise KeyError("rows")


def run_under_jit():
    mapped = jax.jit(jax.pmap(train_step, "i"))
    assert mapped(jnp.ones((N, 8)), rows_of(2))[0].shape == (N, 8)


@pytest.mark.parametrize(
    ("run", "name", "lines"),
    [
        (fail, None, ["raised KeyError('rows'), and did not call a training", "called: init"]),
        (lambda: sys.exit(3), "train_step", ["raised SystemExit(3), and did not", "'train_step'"]),
        (lambda: train(jax.pmap, []), "other", ["trains", "<lambda>, init, <lambda>, train_step"]),
        (run_under_jit, None, ["The program ended", "called: none"]),
    ],
)
def test_a_program_without_such_a_step_says_what_it_called(run, name, lines):
    with pytest.raises(NotImplementedError) as caught:
        find_step(run, name)

    assert [line for line in lines if line not in str(caught.value)] == []
