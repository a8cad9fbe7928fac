"""What the compiled program moves, against numbers worked out by hand.

The mesh is 4 by 2 and x is float32[8, 6], so a block of both axes is [2, 3]: 24 bytes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jax_dist import _hlo
from jax_dist._hlo import Collective

_X = np.arange(48.0, dtype=np.float32).reshape(8, 6)


def _mesh(order=range(8)):
    devices = np.array(jax.devices())[list(order)].reshape(4, 2)
    return Mesh(devices, ("i", "j"), axis_types=(AxisType.Auto,) * 2)


def _program(body, spec="ij", mesh=None):
    specs = {"in_specs": P(*spec), "out_specs": P("i", "j")}
    mapped = jax.shard_map(body, mesh=mesh or _mesh(), check_vma=False, **specs)
    return _hlo.ProgramCost.measure(jax.jit(mapped).lower(_X))


def _scan(body, length):
    return lambda x: lax.scan(body, x, None, length=length)[0]


_inner = _scan(lambda x, _: (lax.psum(x, "j") * 0.5, None), 3)
_nested = lambda x, _: (lax.psum(_inner(x), "i") * 0.25, None)
_if_large = lambda x: lax.cond(x[0, 0] > 3, lambda x: lax.psum(x, "i"), lambda x: x + 1, x)
_branches = [lambda x, n=n: lax.psum(x * n, "i") for n in (1.0, 2.0, 3.0)]
_switch = lambda x, index: (lax.switch(index, _branches, x) * 0.1, None)

UNKNOWN, BRANCH = "in a loop of unknown length", "in a branch"
PROGRAMS = {  # the function of one device, its in_specs, and kind, axes, size, count, bytes, moved
    "psum over i": (lambda x: lax.psum(x, "i"), "ij", [("all-reduce", "i", 4, 1, 24, 36.0)]),
    "all_gather over both, the minor one first": (lambda x: lax.all_gather(x, ("j", "i")).sum(0),
        "ij", [("all-gather", "ij", 8, 1, 192, 168.0)]),
    "psum_scatter": (lambda x: lax.psum_scatter(x, "j", scatter_dimension=1, tiled=True),
        "i", [("reduce-scatter", "j", 2, 1, 24, 24.0)]),
    "ppermute around a ring": (lambda x: lax.ppermute(x, "i", [(0, 1), (1, 2), (2, 3), (3, 0)]),
        "ij", [("collective-permute", "i", 4, 1, 24, 24.0)]),
    "all_to_all": (lambda x: lax.all_to_all(x, "j", 1, 0, tiled=True),
        "i", [("all-to-all", "j", 2, 1, 48, 24.0)]),
    "groups that are no axis": (lambda x: lax.psum(x, "i", axis_index_groups=[[0, 1], [2, 3]]),
        "ij", [("all-reduce", "", 2, 1, 24, 24.0)]),
    "scans multiply": (_scan(_nested, 5),
        "ij", [("all-reduce", "j", 2, 15, 24, 24.0), ("all-reduce", "i", 4, 5, 24, 36.0)]),
    "the condition of a while": (
        lambda x: lax.while_loop(lambda x: lax.psum(x.sum(), ("i", "j")) < 9, lambda x: x + 1, x),
        "ij", [("all-reduce", "ij", 8, 1, 4, 7.0, UNKNOWN)]),
    "a branch": (_if_large, "ij", [("all-reduce", "i", 4, 1, 24, 36.0, BRANCH)]),
    "a branch in a while": (lambda x: lax.while_loop(lambda x: x[0, 0] < 1e5, _if_large, x),
        "ij", [("all-reduce", "i", 4, 1, 24, 36.0, UNKNOWN)]),
    "a switch in a scan": (lambda x: lax.scan(_switch, x, jnp.arange(7) % 3)[0],
        "ij", [("all-reduce", "i", 4, 21, 24, 36.0, BRANCH)]),
}  # fmt: skip


@pytest.mark.parametrize("case", PROGRAMS)
def test_the_collectives_of_a_program(case):
    body, spec, rows = PROGRAMS[case]

    program = _program(body, spec, _mesh(order=(3, 1, 2, 0, 7, 6, 4, 5)))

    expected = [Collective(kind, tuple(axes), *rest) for kind, axes, *rest in rows]
    assert sorted(program.collectives, key=str) == sorted(expected, key=str)
    assert program.moved_bytes == sum(each.count * each.moved_bytes for each in expected)


def test_sizes_of_one_device_and_a_captured_array():
    weights = np.arange(4800, dtype=np.float32).reshape(8, 6, 100)  # or it would be one number

    program = _program(lambda x: x + lax.all_gather(weights, "i").sum((0, 3))[:2, :3])

    assert (program.argument_bytes, program.output_bytes) == (24, 24)  # [2, 3]
    assert 0 <= program.constants_bytes - weights.nbytes < 100
    assert program.stablehlo_bytes > 2 * weights.nbytes  # two hexadecimal digits a byte
    assert program.temp_bytes >= 4 * weights.nbytes  # the gathered array


# What CPU never writes, as XLA writes it for other devices.
_PARTS = """\
HloModule jit_step, is_scheduled=true, num_partitions=8

%scattering (p: f32[32]) -> f32[8] {
  %p = f32[32]{0} parameter(0)
  ROOT %rs = f32[8]{0} reduce-scatter(%p), channel_id=5, replica_groups=[2,4]<=[4,2]T(1,0), \
use_global_device_ids=true, dimensions={0}, to_apply=%add
}

%gathering (p: bf16[8,16]) -> bf16[64,16] {
  %p = bf16[8,16]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.1 = bf16[64,16]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=6, \
replica_groups=mesh['axis_0'=8,'axis_1'=1] {'axis_0'}, frontend_attributes={chain_id="0"}
}

ENTRY %main (x: f32[4,2], y: bf16[3]) -> f32[8] {
  %x = f32[4,2]{1,0:T(8,128)S(1)} parameter(0)
  %y = bf16[3]{0} parameter(1)
  %ar = (f32[4,2]{1,0}, bf16[3]{0}) all-reduce-start(%x, %y), channel_id=1, \
replica_groups=[4,2]<=[8], to_apply=%add
  %ar-done = (f32[4,2]{1,0}, bf16[3]{0}) all-reduce-done(%ar)
  %ag = (f32[4,2]{1,0}, f32[32]{0:T(256)}) all-gather-start(%x), channel_id=2, \
replica_groups=mesh['i'=4,'j'=2] {'i'}, dimensions={0}
  %ag-done = f32[32]{0:T(256)} all-gather-done(%ag)
  %ag2 = ((f32[4,2]{1,0}, bf16[3]{0}), (f32[8,2]{1,0}, /*index=1*/bf16[6]{0})) \
all-gather-start(%x, %y), channel_id=3, replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}
  %cp = (f32[4,2]{1,0}, f32[4,2]{1,0}, u32[], u32[]) collective-permute-start(%x), channel_id=4, \
source_target_pairs={{0,6},{6,0}}
  %fusion.1 = bf16[64,16]{1,0} fusion(%a), kind=kOutput, calls=%gathering
  %fusion.2 = bf16[64,16]{1,0} fusion(%a), kind=kOutput, calls=%gathering
  %rs-start = ((f32[32]{0}), f32[8]{0}, s32[]) async-start(%ag-done), calls=%scattering
  %rs-update = ((f32[32]{0}), f32[8]{0}, s32[]) async-update(%rs-start), calls=%scattering
  ROOT %rs-done = f32[8]{0} async-done(%rs-update), calls=%scattering
}
"""


def test_collectives_in_halves_or_in_several_fusions_are_counted_once():
    assert _hlo.HloModule.parse(_PARTS).collectives([_mesh().shape]) == (
        Collective("all-reduce", ("j",), 2, 1, 38, 38.0),
        Collective("all-gather", ("i",), 4, 1, 128, 96.0),
        Collective("all-gather", ("j",), 2, 1, 76, 38.0),
        Collective("collective-permute", ("i",), 4, 1, 32, 32.0),
        Collective("all-gather", ("i", "j"), 8, 1, 2048, 1792.0),
        Collective("reduce-scatter", ("i",), 4, 1, 32, 96.0),
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("module @jit_f {}", "^not the text of a compiled program: it has no"),
        (_PARTS.replace("[4,2]<=[8]", "every<2>"), "collective joins: replica_groups=every"),
    ],
)
def test_a_text_that_cannot_be_read(text, line):
    with pytest.raises(ValueError, match=line):
        _hlo.HloModule.parse(text).collectives()


# The forms in which compiled programs name groups of devices.
_WRITTEN = {
    "replica_groups={{0,5},{2,3}}, use_global": [[0, 5], [2, 3]],
    "source_target_pairs={}": [],
    "replica_groups={}": [[0, 1, 2, 3, 4, 5]],
    "channel_id=1": [[0, 1, 2, 3, 4, 5]],
    "replica_groups=[2,3]<=[6]": [[0, 1, 2], [3, 4, 5]],
    "replica_groups=[3,2]<=[2,3]T(1,0)": [[0, 3], [1, 4], [2, 5]],
    "replica_groups=mesh['i'=3,'j'=2] {'j','i'}": [[0, 2, 4, 1, 3, 5]],
    "replica_groups=mesh[i=3,j=2] {j}": [[0, 1], [2, 3], [4, 5]],
    "replica_groups=mesh['i'=2] {}": [[0], [1]],
    "replica_groups=mesh['a b.c-d'=6] {'a b.c-d':(1)2}": [[0, 3], [1, 4], [2, 5]],
    "replica_groups=mesh['i'=8] {'i':(4)2,'i':(1)2}": [[0, 4, 1, 5], [2, 6, 3, 7]],
    "replica_groups=mesh['i'=4], device_ids=(3,1,2,0) {'i':(1)2}, x": [[3, 2], [1, 0]],
    "replica_groups=mesh['a'=3,'b'=2], device_ids=([2,3]T(1,0)) {'a'}": [[0, 1, 2], [3, 4, 5]],
}


@pytest.mark.parametrize("written", _WRITTEN)
def test_groups_are_read(written):
    assert _hlo.groups_of(written, 6) == _WRITTEN[written]


@pytest.mark.parametrize(
    ("groups", "is_permute", "axes"),
    [
        ([(0, 2, 4), (1, 3, 5)], False, "i"),
        ([(0, 1, 2, 3, 4, 5)], False, "ij"),
        ([(0, 1, 2), (3, 4, 5)], False, ""),
        ([(0, 2, 4)], False, ""),  # and the others?
        ([(0, 2), (2, 4), (4, 0)], True, "i"),
        ([(0, 1)], True, "j"),
        ([(0, 3)], True, "ij"),
        ([], True, ""),
    ],
)
def test_axes_of_groups(groups, is_permute, axes):
    assert _hlo.axes_of(groups, [{"i": 3, "j": 2, "k": 1}], is_permute=is_permute)[0] == tuple(axes)
