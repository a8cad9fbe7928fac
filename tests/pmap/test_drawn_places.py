"""Drawn programs on arguments that lie anywhere, under any mesh: not a bit may change.

What the programs compute is compared with `jax.pmap` elsewhere, on arguments from the host. Here
each is called again: with its arguments on one device, on some, on another mesh; with random keys
of every kind; under a mesh that the user has set; by itself and in a jit.
"""

import contextlib
import dataclasses
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_parity import _NAME, _SETTINGS, Program, programs

import jax_dist
from jax_dist import errors

pytestmark = [
    pytest.mark.mapping,
    pytest.mark.filterwarnings("ignore:Some donated buffers were not usable"),
]

_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")


def _mesh(shape: tuple[int, ...], kind: AxisType = AxisType.Auto) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, ("p", "q", "r")[: len(shape)], axis_types=(kind,) * len(shape))


def _cut(x: Any, shape: tuple[int, ...]) -> jax.Array:
    """Over the dimensions that allow it."""
    mesh = _mesh(shape)
    names = iter(mesh.axis_names)
    spec = []
    free = next(names, None)
    for size in np.shape(x):
        fits = free is not None and size % mesh.shape[free] == 0
        spec.append(free if fits else None)
        free = next(names, None) if fits else free
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


_PLACES = {
    "host": lambda x: x,
    "default device": jnp.asarray,
    "device 3": lambda x: jax.device_put(x, jax.devices()[3]),
    "two devices": lambda x: _cut(x, (2,)),
    "another mesh": lambda x: _cut(x, (8,)),
    "two axes": lambda x: _cut(x, (4, 2)),
    "copies": lambda x: jax.device_put(x, NamedSharding(_mesh((8,)), P())),
    "reversed": lambda x: jax.device_put(
        x, NamedSharding(Mesh(np.array(jax.devices()[::-1]), ("p",)), P())
    ),
}
_MESHES = {
    "none": contextlib.nullcontext,
    "auto": lambda: jax.set_mesh(_mesh((8,))),
    "auto, two axes": lambda: jax.set_mesh(_mesh((2, 4))),
    "explicit": lambda: jax.set_mesh(_mesh((8,), AxisType.Explicit)),
    "explicit, some": lambda: jax.set_mesh(_mesh((2,), AxisType.Explicit)),
}


@dataclasses.dataclass(frozen=True)
class Placed:
    """A drawn program, and what differs between two calls of it."""

    program: Program
    implementation: str | None  # of the keys that it draws with
    places: tuple[str, ...]  # of the leaves, in turn
    mesh: str
    jitted: bool

    def args(self) -> tuple[Any, ...]:
        if self.implementation is None:
            return self.program.args
        key = jax.random.key(3, impl=self.implementation)
        keys = jax.random.split(key, self.program.size)
        return (*self.program.args, np.asarray(jax.random.key_data(keys)))

    def body(self, *args: Any) -> Any:
        if self.implementation is None:
            return self.program.body(*args)
        key = jax.random.wrap_key_data(args[-1], impl=self.implementation)
        return self.program.body(*args[:-1]), jax.random.bits(key, (3,))

    def options(self) -> dict[str, Any]:
        options = {**self.program.options(), "donate_argnums": ()}
        if self.implementation is not None:
            options["in_axes"] = (*self.program.in_axes, 0)
        return options

    def placed(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        leaves, tree = jax.tree.flatten(args)
        put = [
            leaf if isinstance(leaf, str) else _PLACES[self.places[k % len(self.places)]](leaf)
            for k, leaf in enumerate(leaves)
        ]
        return jax.tree.unflatten(tree, put)


@st.composite
def placed(draw: st.DrawFn) -> Placed:
    return Placed(
        program=dataclasses.replace(draw(programs()), keyword=False),
        implementation=draw(st.sampled_from([None, *_IMPLEMENTATIONS])),
        places=tuple(draw(st.lists(st.sampled_from(sorted(_PLACES)), min_size=1, max_size=3))),
        mesh=draw(st.sampled_from(sorted(_MESHES))),
        jitted=draw(st.booleans()),
    )


def _check(case: Placed) -> None:
    mapped = jax_dist.pmap(case.body, _NAME, **case.options())
    expected = mapped(*case.args())
    call = mapped
    if case.jitted and case.program.static is None and not case.program.reversed_devices:
        call = jax.jit(lambda *args: mapped(*args))
    # jit itself refuses arguments on different devices.
    args = case.placed(case.args()) if call is mapped else case.args()
    with _MESHES[case.mesh]():
        try:
            result = call(*args)
        except errors.MappedAxisError:
            assert call is not mapped
            assert case.mesh != "none"
            return
    for ours, wanted in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == wanted.dtype
        if call is mapped:
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(wanted))
        else:  # in a program of another shape, sums may be added in another order
            close = np.asarray(ours, np.complex64), np.asarray(wanted, np.complex64)
            np.testing.assert_allclose(*close, rtol=1e-5)


@pytest.mark.thorough
@hypothesis.given(placed())
@hypothesis.settings(max_examples=20, derandomize=True, **_SETTINGS)
def test_where_arguments_lie_changes_nothing(case):
    _check(case)


@pytest.mark.slow
@hypothesis.given(placed())
@hypothesis.settings(max_examples=10_000, **_SETTINGS)
def test_ten_thousand_programs_change_nothing(case):
    _check(case)
