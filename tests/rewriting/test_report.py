"""The report: whole texts, as the user sees them, and the same as data."""

import dataclasses
import json
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._cache.explain import Cause
from jax_dist._hlo import Collective, ProgramCost
from jax_dist._passes import PassFinding
from jax_dist._passes.captures import Capture
from jax_dist._rewrite.report import RewriteReport, find_key_causes

_BEFORE = ProgramCost(
    collectives=(
        Collective("all-gather", ("data",), 4, 1, 16_384, 12_288.0),
        Collective("all-reduce", ("data", "model"), 8, 15, 4, 7.0, "in a loop of unknown length"),
    ),
    stablehlo_bytes=2_105_000,
    constants_bytes=1_048_576,
    argument_bytes=65_536,
    output_bytes=4,
    temp_bytes=1_200_000,
)
_AFTER = ProgramCost(
    collectives=(
        Collective("all-reduce", ("data",), 4, 1, 1_024, 1_536.0),
        Collective("collective-permute", (), 2, 1, 4, 4.0, "in a branch"),
    ),
    stablehlo_bytes=2_345,
    constants_bytes=0,
    argument_bytes=1_114_112,
    output_bytes=4,
    temp_bytes=None,
)
_WHY = (
    "the other operand may differ between the devices along 'data', and then the sum of "
    "the products is not a product of sums"
)
_REPORT = RewriteReport(
    name="train_step",
    before=_BEFORE,
    after=_AFTER,
    cache_before=(Cause("captured-array", ("W",)),),
    cache_after=(),
    findings=(
        PassFinding("JXD301", "refused", "all_gather over 'data', then mul", _WHY, "train.py:40"),
        PassFinding("JXD301", "rewritten", "all_gather over 'data', then mean", "", "train.py:12"),
        PassFinding("JXD303", "noted", "psum of a gradient", "it is summed already", ""),
    ),
    captured=(
        Capture("W", (512, 512), "float32", 1_048_576, "train.py:3", "train.py:9", "lifted"),
        Capture("self.mask", (8,), "bool", 8, "train.py:5", "", "kept"),
    ),
)


def test_the_whole_report():
    assert str(_REPORT) == textwrap.dedent("""\
        train_step: 1 rewritten, 1 refused, 1 noted, 1 array lifted, 1 array kept; 12.4
        kB -> 1.5 kB moved per step

        Rewritten
          JXD301  all_gather over 'data', then mean
                  train.py:12

        Refused
          JXD301  all_gather over 'data', then mul
                  because the other operand may differ between the devices along 'data',
                  and then the sum of the products is not a product of sums
                  train.py:40

        Noted
          JXD303  psum of a gradient
                  because it is summed already

        Captured arrays
          name       type              captured    used        now      bytes
          W          float32[512,512]  train.py:3  train.py:9  lifted  1.0 MB
          self.mask  bool[8]           train.py:5              kept       8 B

        Collectives, per step on one device
                  kind                axes              devices  count   result    moved
          before  all-gather          data                    4      1  16.4 kB  12.3 kB
          before  all-reduce          data, model             8     15      4 B    105 B
                  in a loop of
                  unknown length
          after   all-reduce          data                    4      1   1.0 kB   1.5 kB
          after   collective-permute  none of the mesh        2      1      4 B      4 B
                  in a branch

        Program, on one device
                                     before    after
          StableHLO text             2.1 MB   2.3 kB
          constants in it            1.0 MB      0 B
          arguments                 65.5 kB   1.1 MB
          results                       4 B      4 B
          peak of temporary memory   1.2 MB  unknown

        Key in the persistent cache
          before  another one in each process, or never written:
                  JXD401 captured-array: An array inside the program differs; pass it as
                  an argument, or let jax_dist.rewrite or jax_dist.pmap lift it.
                    W
          after   the same in every process, as far as the program shows""")


def test_nothing_to_rewrite_is_short():
    report = RewriteReport("step", ProgramCost(), ProgramCost(), (), ())

    assert str(report) == "step: nothing to rewrite; nothing moved between devices"


@pytest.mark.parametrize("text", ["a" * 300, "ab " * 100, "/a-b" * 75, "self.layers['w'] " * 9])
def test_no_line_is_longer_than_a_terminal(text):
    finding = PassFinding("JXD301", "refused", text, text, text)
    captured = Capture(text, (10,) * 30, text, 10**15, text, text)
    collective = Collective(text, (text, "j"), 10**6, 10**6, 10**12, 1e12, "in a branch")
    program = ProgramCost((collective,), *[10**15] * 5)
    causes = (Cause("captured-array", (text, text)),)
    report = RewriteReport(text, program, ProgramCost(), causes, causes, (finding,), (captured,))

    assert max(map(len, str(report).splitlines())) <= 80


def test_the_data_go_through_json():
    data = _REPORT.to_dict()

    assert json.loads(json.dumps(data)) == data
    parts = ("before", "after", "cache_before", "cache_after", "plan")
    assert set(data) == {"name", "summary", "findings", "captured", "moved_bytes", *parts}
    assert data["moved_bytes"] == {"before": 12_393.0, "after": 1_540.0}
    assert data["findings"][1] == dataclasses.asdict(_REPORT.findings[1])
    assert data["captured"][1]["shape"] == [8]
    assert data["before"]["collectives"][1]["axes"] == ["data", "model"]
    assert data["after"]["temp_bytes"] is None


# ---- the verdict on the key of a program; test_captured_keys.py looks at keys in two processes

_X = np.arange(12.0, dtype=np.float32).reshape(4, 3)
_MESH = Mesh(np.array(jax.devices()[:4]), ("i",), axis_types=(AxisType.Auto,))


@custom_partitioning
def _centre(x):
    return x - x.mean(-1, keepdims=True)


_centre.def_partition(
    lambda mesh, args, result: (mesh, _centre.fun, result.sharding, (args[0].sharding,)),
    sharding_rule="i j -> i j",
)
_SHAPE, _SPREAD = jax.ShapeDtypeStruct((4, 3), jnp.float32), NamedSharding(_MESH, P("i"))
_CALLBACK = [] if _compat.CACHES_HOST_CALLBACKS else ["host-callback"]
# By name: the program, the sharding of its argument, and the causes of another key.
_KEYS = {
    "plain": (lambda x: {"a": x * 2, "b": x + 1}, None, []),
    "numbers in the program": (lambda x: x * 123456789.0 + 0x7F3A12, None, []),
    "shard_map": (
        jax.shard_map(lambda x: jax.lax.psum(x, "i"), mesh=_MESH, in_specs=P("i"), out_specs=P()),
        None,
        [],
    ),
    "partitioned by one device": (lambda x: _centre(x), None, []),
    "an address": (lambda x: _centre(x), _SPREAD, ["custom-partitioning"]),
    "pure_callback": (lambda x: jax.pure_callback(np.asarray, _SHAPE, x), None, _CALLBACK),
    "io_callback": (lambda x: io_callback(np.asarray, _SHAPE, x, ordered=True), None, _CALLBACK),
    "debug.print": (lambda x: (jax.debug.print("{}", x[0, 0]), x)[1], None, _CALLBACK),
}


@pytest.mark.parametrize("name", _KEYS)
def test_causes_of_another_key(name):
    fun, sharding, causes = _KEYS[name]
    lowered = jax.jit(fun).lower(jax.device_put(_X, sharding))
    assert [cause.name for cause in find_key_causes(lowered, ())] == causes
