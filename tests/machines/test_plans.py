"""A plan: what each way to run a step takes, on the devices that are here and on others."""

import dataclasses
import functools
import json
import os
import textwrap
import types
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dist
from jax_dist.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from jax_dist.machines import plans, ways
from jax_dist.machines.cost import Collective, ProgramCost
from jax_dist.machines.plans import plan
from jax_dist.machines.report import Machine, Plan, PlannedWay

pytestmark = pytest.mark.rewriting


def _step(params, batch):
    loss = lambda params: jnp.mean((jnp.tanh(batch["x"] @ params["w"]) @ params["v"]) ** 2)
    value, gradient = jax.value_and_grad(loss)(params)
    gradient = jax.lax.pmean(gradient, "i")
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), jax.lax.pmean(value, "i")


_PARAMS = {"w": np.ones((64, 128), np.float32), "v": np.ones((128, 8), np.float32)}
_BATCH = {"x": np.ones((4, 64), np.float32)}
_STATE_BYTES = 4 * (64 * 128 + 128 * 8)
_BATCH_BYTES = 4 * 4 * 64
_FOUR = ["jax.pmap", "replicated", "fsdp", "fsdp-regather"]


def _stacked(count, tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), tree)


def _planned(**options):
    mapped = jax.pmap(_step, "i", donate_argnums=0)
    return plan(mapped, _stacked(2, _PARAMS), _stacked(2, _BATCH), on=jax.devices(), **options)


def test_each_way_is_compiled_and_measured():
    found = _planned()

    rows = {row.way: row for row in found.rows}
    assert [*rows] == _FOUR
    assert {row.machine for row in found.rows} == {"8 cpu devices"}
    whole, parts = _STATE_BYTES + _BATCH_BYTES, _STATE_BYTES // 8 + _BATCH_BYTES
    sizes = {way: row.program.argument_bytes for way, row in rows.items()}
    assert sizes == dict(zip(_FOUR, [whole, whole, parts, parts], strict=True))
    assert all(row.fits is None and row.verdict == "limit unknown" for row in found.rows)
    assert rows["fsdp"].needed < rows["jax.pmap"].needed


def test_the_numbers_are_those_of_the_program_that_runs():
    mapped = jax.pmap(_step, "i", donate_argnums=0)
    memory = mapped.lower(_stacked(8, _PARAMS), _stacked(8, _BATCH)).compile().memory_analysis()

    (row,) = _planned(ways=["jax.pmap"]).rows

    assert row.program.argument_bytes == memory.argument_size_in_bytes
    assert row.program.temp_bytes == memory.temp_size_in_bytes
    assert row.program.alias_bytes == memory.alias_size_in_bytes == _STATE_BYTES
    assert row.needed == (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )
    (reduced,) = row.program.collectives
    assert (reduced.kind, reduced.axes, reduced.size) == ("all-reduce", ("i",), 8)


_MAPPED = {
    "jax.pmap": lambda: jax.pmap(_step, "i", donate_argnums=0),
    "jax_dist.pmap": lambda: jax_dist.pmap(_step, "i", donate_argnums=0),
    "jit of jax.pmap": lambda: jax.jit(jax.pmap(_step, "i", donate_argnums=0)),
    "jit of jax_dist.pmap": lambda: jax.jit(jax_dist.pmap(_step, "i", donate_argnums=0)),
    "a function that calls it": lambda: lambda *args: jax.pmap(_step, "i", donate_argnums=0)(*args),
}


@pytest.mark.thorough
@pytest.mark.parametrize("way", _MAPPED)
@pytest.mark.parametrize("slices", [1, 3, 64])
def test_a_mapped_function_is_planned_for_as_many_devices_as_there_are(way, slices):
    found = plan(
        _MAPPED[way](), _stacked(slices, _PARAMS), _stacked(slices, _BATCH), on=jax.devices()
    )

    expected = _planned()
    programs = [
        [dataclasses.replace(row.program, stablehlo_bytes=0) for row in each.rows]  # names differ
        for each in (found, expected)
    ]
    assert programs[0] == programs[1]
    assert found.name == ("<lambda>" if way.startswith("a function") else "_step")


def test_axes_static_arguments_and_keywords_stay_what_they_are():
    def scaled(times, params, x, *, bias):
        return params + times * jax.lax.psum(x.sum() + bias.sum(), "i")

    mapped = functools.partial(
        jax.pmap, axis_name="i", in_axes=(None, None, 1), out_axes=None,
        static_broadcasted_argnums=0,
    )(scaled)  # fmt: skip
    types = (
        jax.ShapeDtypeStruct((32, 64), jnp.float32),
        jax.ShapeDtypeStruct((5, 2, 7), jnp.float32),
    )
    step = plans.MappedStep.of_mapped(
        mapped, (3, *types), {"bias": jax.ShapeDtypeStruct((2, 9), jnp.float32)}
    )

    assert [leaf.shape for leaf in step.slices] == [(32, 64), (5, 7), (9,)]
    assert [leaf.shape for leaf in step.leaves(8)] == [(32, 64), (5, 8, 7), (8, 9)]
    found = plans.plan_step(step, plans.machines_of(jax.devices()))
    assert [row.problem for row in found.rows] == [""] * 4
    assert found.rows[2].program.argument_bytes == 4 * (32 * 64 // 8 + 5 * 7 + 9)


def test_a_step_without_a_state_has_no_way_to_keep_it_in_parts():
    mapped = jax.pmap(lambda x: jax.lax.pmean(x.sum(), "i"), "i")

    found = plan(mapped, _stacked(2, _BATCH["x"]), on=jax.devices())

    row, *others = found.rows
    assert row.program is not None
    assert {other.problem for other in others} == {
        "'<lambda>' carries no state that could lie in parts"
    }
    assert "no program" not in str(found)
    assert "  fsdp           '<lambda>' carries no state" in str(found)


def test_the_state_can_be_named():
    def two(first, second, x):
        return first + jax.lax.psum(x.sum(), "i"), second, x

    args = _stacked(2, [np.ones((64, 64), np.float32)] * 2 + [np.ones(4, np.float32)])
    bytes_of = lambda **options: plan(
        jax.pmap(two, "i"), *args, on=jax.devices(), ways=["fsdp"], **options
    ).rows[0].program.argument_bytes  # fmt: skip

    assert bytes_of() == 2 * 4 * 64 * 64 // 8 + 16  # both come back
    assert bytes_of(state=0) == 4 * 64 * 64 // 8 + 4 * 64 * 64 + 16


def test_our_pmap_is_a_way_of_its_own_where_it_makes_another_program():
    gathered = lambda x: jax.lax.all_gather(x, "i").mean((0, 1))

    found = plan(jax.pmap(gathered, "i"), np.ones((2, 64, 64), np.float32), on=jax.devices())

    kinds = {
        row.way: [each.kind for each in row.program.collectives]
        for row in found.rows
        if row.program
    }
    assert kinds == {"jax.pmap": ["all-gather"], "jax_dist.pmap": ["all-reduce"]}


def test_progress_is_told_a_line_at_a_time():
    told = []

    _planned(ways=["jax.pmap", "fsdp"], progress=told.append)

    starts = [line.partition(", compiled in")[0] for line in told]
    assert starts == [
        f"compiles 2 programs, {min(2, os.cpu_count())} at a time",
        "1 of 2: jax.pmap on 8 cpu devices: limit unknown",
        "2 of 2: fsdp on 8 cpu devices: limit unknown",
    ]


@pytest.mark.parametrize(
    ("wrong", "kind", "line"),
    [
        ({"ways": ["fsdp-regater"]}, ArgumentTypeError, "Did you mean fsdp-regather?"),
        ({"on": "v5:4x4"}, ValueError, "Did you mean v5e?"),
        ({"on": [3]}, ArgumentTypeError, "plan got something else than a machine"),
        ({"on": []}, ArgumentTypeError, "on=[]"),
    ],
)
def test_what_cannot_be_planned_is_refused(wrong, kind, line):
    options = {"on": jax.devices(), **wrong}

    with pytest.raises(kind) as raised:
        plan(jax.pmap(_step, "i"), _stacked(2, _PARAMS), _stacked(2, _BATCH), **options)

    assert line in str(raised.value)


def test_a_function_that_is_not_mapped_is_refused():
    with pytest.raises(UnsupportedError) as raised:
        plan(lambda params, batch: (params, batch), _PARAMS, _BATCH, on=jax.devices())

    assert "'<lambda>' maps nothing" in str(raised.value)


# ---- what does not fit

_LIMIT = 16_911_433_728


def test_a_program_that_the_compiler_refuses_for_its_size_is_a_row(monkeypatch):
    error = jax.errors.JaxRuntimeError(
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (20.45G) exceeds available HBM (15.75G)."
    )

    class Lowered:
        def compile(self, **options):
            raise error

    monkeypatch.setattr(plans.ways_of, "lowered", lambda *args: Lowered())
    monkeypatch.setattr(
        plans, "machines_of", lambda on: [Machine("v5e:16x16", tuple(jax.devices()), _LIMIT)]
    )

    found = _planned(ways=["fsdp"])

    (row,) = found.rows
    assert (row.fits, row.needed, row.problem) == (False, 21_958_020_301, "")
    assert row.verdict == "does NOT fit, by 5.0 GB"
    assert found.advice == (
        "It does not fit on v5e:16x16: fsdp needs least, 22.0 GB of 16.9 GB. Try more devices, or "
        "less for each."
    )


def test_any_other_failure_of_the_compiler_is_told_as_it_is(monkeypatch):
    class Lowered:
        def compile(self, **options):
            raise jax.errors.JaxRuntimeError("INTERNAL: no such thing\nat line 3")

    monkeypatch.setattr(plans.ways_of, "lowered", lambda *args: Lowered())

    (row,) = _planned(ways=["fsdp"]).rows

    assert (row.fits, row.needed, row.problem) == (None, None, "INTERNAL: no such thing")


@pytest.mark.parametrize(
    ("memory", "efforts"),
    [(None, [9]), (10**9, [9]), (10**5, [9, None]), (10, [9, None])],
    ids=["no limit", "much is free", "little is free", "it does not fit"],
)
def test_a_quick_plan_compiles_in_full_what_comes_near_the_limit(memory, efforts, monkeypatch):
    asked = []
    compiled = jax.stages.Lowered.compile

    def noted(self, compiler_options=None):
        asked.append(compiler_options.get("optimization_level"))
        return compiled(self, compiler_options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", noted)
    machine = Machine("a thimble", tuple(jax.devices()), memory)
    monkeypatch.setattr(plans, "machines_of", lambda on: [machine])

    found = _planned(ways=["jax.pmap"], quick=True)

    (row,) = found.rows
    assert row.needed > 7 * 10**4
    assert (asked, row.is_quick) == (efforts, efforts == [9])
    assert ("about" in row.verdict) == (memory == 10**9)
    assert ("(--quick)" in str(found)) == row.is_quick


# ---- text, JSON, picture


def _row(machine, way, needed, memory=_LIMIT, **program):
    known = {"argument_bytes": 377_600_000, "temp_bytes": 619_300_000, **program}
    reduced = Collective("all-reduce", ("i",), 16, 2, 64, 118_000_000.0)
    cost = ProgramCost((reduced,), **known)
    return PlannedWay(machine, way, cost, 41.7, memory, needed)


def _whole():
    devices = tuple(jax.devices())
    rows = (
        _row("v5e:2x4", "jax.pmap", 906_200_000, cycles=14_900_000),
        _row("v5e:2x4", "fsdp", 546_600_000, cycles=12_800_000),
        PlannedWay("tiny", "jax.pmap", None, 3.0, 500_000_000, 906_000_000),
        _row("tiny", "fsdp", 480_000_000, 500_000_000),
        PlannedWay("tiny", "replicated", problem="the step maps inside"),
    )
    machines = (Machine("v5e:2x4", devices, _LIMIT), Machine("tiny", devices, 500_000_000))
    return Plan("step", machines, rows, slices=8)


def test_the_whole_table():
    assert str(_whole()) == textwrap.dedent("""\
        step: It fits on v5e:2x4 in each way; fsdp needs least, 546.6 MB. It fits on
          tiny only as fsdp; fsdp needs least, 480.0 MB.

        v5e:2x4: 8 devices on 1 host, with 16.9 GB for programs on each
          way       on one device       arguments  the rest      peak
          jax.pmap  fits, 16.0 GB free   377.6 MB  528.6 MB  906.2 MB
          fsdp      fits, 16.4 GB free   377.6 MB  169.0 MB  546.6 MB

        v5e:2x4, in one step
          way          moved  cycles  compiled in
          jax.pmap  236.0 MB  14.9 M       41.7 s
            2 all-reduce
          fsdp      236.0 MB  12.8 M       41.7 s
            2 all-reduce

        tiny: 8 devices on 1 host, with 500.0 MB for programs on each
          way       on one device              arguments  the rest      peak
          jax.pmap  does NOT fit, by 406.0 MB          -         -  906.0 MB
          fsdp      fits, 20.0 MB free          377.6 MB  102.4 MB  480.0 MB
          replicated  the step maps inside

        tiny, in one step
          way      moved  cycles  compiled in
          fsdp  236.0 MB       -       41.7 s
            2 all-reduce

        What the ways are
          jax.pmap    the program as it is
          fsdp        by global_view, the state in parts, gathered once in a step
          replicated  by global_view, a whole copy of the state on each device

        What the numbers are
          the rest  results that take over no donated argument, and what the step works
                    with, at its peak
          moved     sent over the network by each device in one step, around a ring;
                    what is in a loop of unknown length counts once, so that it is more
          cycles    the compiler's own estimate of what it orders its work by, bodies of
                    loops once, waiting for other devices left out: it compares programs
                    for one machine, and is no time""")


def test_of_ways_that_fit_the_one_that_sends_least_is_named_too():
    ring = Collective("all-reduce", ("i",), 16, 1, 64, 1_000.0)
    less = PlannedWay("v5e:2x4", "replicated", ProgramCost((ring,)), 1.0, _LIMIT, 900_000_000)
    fsdp = _row("v5e:2x4", "fsdp", 546_600_000)
    machine = Machine("v5e:2x4", tuple(jax.devices()), _LIMIT)

    assert Plan("step", (machine,), (less, fsdp), slices=8).advice == (
        "It fits on v5e:2x4 in each way; replicated sends least, fsdp needs least, 546.6 MB."
    )


def test_a_batch_of_another_size_is_said():
    machine = Machine("v5e:2x4", tuple(jax.devices()), _LIMIT)
    rows = (_row("v5e:2x4", "fsdp", 546_600_000),)

    text = str(Plan("step", (machine,), rows, slices=2))

    assert "the call had 2 slices; each device gets one, which makes 4 times as" in text
    assert "a batch" not in str(Plan("step", (machine,), rows, slices=8))


def test_what_a_loop_of_unknown_length_sends_is_a_lower_bound():
    runs = "in a loop of unknown length"
    looped = Collective("all-gather", ("i",), 16, 1, 64, 8e9, runs=runs)
    row = PlannedWay("tiny", "fsdp", ProgramCost((looped,)), 1.0, _LIMIT, 5 * 10**8)
    machine = Machine("tiny", tuple(jax.devices()), _LIMIT)

    assert "at least 8.0 GB" in str(Plan("step", (machine,), (row,), slices=8))


def test_the_plan_as_data():
    data = _whole().to_dict()

    assert json.loads(json.dumps(data)) == data
    assert data["machines"][1] == {
        "name": "tiny", "devices": 8, "hosts": 1, "memory_bytes": 500_000_000,
    }  # fmt: skip
    assert [row["fits"] for row in data["rows"]] == [True, True, False, True, None]
    assert data["rows"][0]["program"]["cycles"] == 14_900_000
    assert data["rows"][4]["problem"] == "the step maps inside"


def test_the_picture_has_a_bar_for_each_way_and_the_limit():
    root = ET.fromstring(_whole().picture())
    inside = "{http://www.w3.org/2000/svg}"

    texts = [each.text for each in root.iter(f"{inside}text")]
    assert texts[1:5] == ["v5e:2x4", "jax.pmap", "906.2 MB", "fsdp"]
    assert texts.count("no program") == 1
    assert "500.0 MB for programs" in texts
    kinds = [each.get("class") for each in root.iter(f"{inside}rect")]
    assert kinds == ["card", "part0", "part1", "part0", "part1", "part1", "over",
                     "part0", "part1"]  # fmt: skip
    widths = [float(each.get("width")) for each in root.iter(f"{inside}rect")][1:]
    assert widths[0] + widths[1] == pytest.approx(400 * 906.2e6 / _LIMIT, abs=0.2)
    assert all(float(line.get("x1")) <= 530 for line in root.iter(f"{inside}line"))
    assert _whole().picture().startswith("<svg ")


def test_explain_has_the_plan_of_a_machine():
    mapped = jax.pmap(lambda w, x: w - jax.lax.all_gather(x @ w, "i").mean(0), "i")
    args = (np.ones((3, 64, 64), np.float32), np.ones((3, 64, 64), np.float32))

    report = jax_dist.explain(mapped, *args, devices=jax.devices())

    assert {row.way for row in report.plan.rows} == {*_FOUR, "jax_dist.pmap"}
    assert [(each.kind, each.size) for each in report.before.collectives] == [("all-gather", 8)]
    assert [(each.kind, each.size) for each in report.after.collectives] == [("all-reduce", 8)]
    assert "Ways to run it" in str(report)
    assert jax_dist.explain(mapped, *args).plan is None


@pytest.mark.parametrize(("hosts", "share"), [(1, 8), (2, 4)])
def test_the_state_is_cut_in_a_host_and_copied_over_hosts(monkeypatch, hosts, share):
    rows = lambda devices: np.array(devices).reshape(hosts, -1)  # all are of one process here
    monkeypatch.setattr(ways, "_hosts", rows)
    found = {row.way: row.program for row in _planned(ways=["jax.pmap", "hsdp"]).rows}

    assert found["hsdp"].argument_bytes == _STATE_BYTES // share + _BATCH_BYTES
    assert found["jax.pmap"].argument_bytes == _STATE_BYTES + _BATCH_BYTES


def test_devices_have_a_row_for_each_host():
    devices = [types.SimpleNamespace(process_index=host) for host in (0, 1, 0, 1)]
    assert ways._hosts(devices).tolist() == [devices[::2], devices[1::2]]
    with pytest.raises(ArgumentError, match="host 1 has 1"):
        ways._hosts(devices[:3])
