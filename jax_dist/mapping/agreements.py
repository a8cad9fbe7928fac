"""With several processes, a new program is agreed upon before it first runs.

Processes that run programs with other shapes, or the same ones in another order, get wrong numbers
or hang. So before a signature is called for the first time, they compare it. A program without
collectives runs in one process alone as well, and is not compared.
"""

import contextlib
import inspect
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from jax_dist import _compat
from jax_dist.mapping.axes import Axis
from jax_dist.mapping.body import Body, type_of
from jax_dist.mapping.calls import Call, Options
from jax_dist.mapping.meshes import Layout
from jax_dist.multihost import agreement
from jax_dist.multihost.agreement import (
    Fingerprint,
    containers,
    describe,
)
from jax_dist.passes.interpreter import equations

_LOCAL = ("axis_index", "pcast", "pvary")  # they name a mesh axis, and move nothing
_DO = (
    "Call the same mapped functions in all processes, in the same order, with arguments of the "
    "same shapes. What one process computes alone belongs on jax.local_devices()."
)


def signature_of(call: Call) -> Hashable:
    """What a call looks like, as far as programs depend on it."""
    types = [type_of(leaf) for leaf in call.leaves]
    return (
        call.structure,
        tuple((kind.shape, kind.dtype, kind.weak_type) for kind in types),
        call.static,
    )


def agree(
    options: Options, fun: Callable, call: Call, body: Body, layout: Layout, moves: Sequence[str]
) -> None:
    """With the other processes, on the program that is to run.

    Args:
      options: what was said to pmap.
      fun: the function.
      call: on whole arrays.
      body: for this call.
      layout: the mesh.
      moves: the collectives of the body.

    Raises:
      DisagreementError: the others are about to run another one.
    """
    fingerprint = with_collectives(_fingerprint(options, call, body, layout), moves)
    agree_to_run(f"pmap of {described(fun)}", fingerprint, processes_of(layout.mesh))


def agree_to_run(name: str, fingerprint: Fingerprint, ranks: Sequence[int]) -> None:
    """Before these processes run a program for the first time.

    Raises:
      DisagreementError: they are about to run different ones.
      MissingRanksError: some of them did not come.
    """
    if _compat.joined_as() is None:  # nothing to compare over
        return
    agreement.agree_on(name, fingerprint, timeout=agreement.program_timeout, ranks=ranks, do=_DO)


def processes_of(mesh: jax.sharding.Mesh) -> tuple[int, ...]:
    """Those whose devices are in the mesh."""
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))


def described(fun: Any) -> str:
    """A function by its name and line: `'step' (train.py:12)`."""
    name = getattr(fun, "__name__", type(fun).__name__)
    with contextlib.suppress(ValueError):  # a wrapper around itself
        fun = inspect.unwrap(fun)
    code = getattr(fun, "__code__", None)
    if code is None:
        return f"'{name}'"
    return f"'{name}' ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def collectives(jaxpr: ClosedJaxpr) -> list[str]:
    """What devices send one another, in order: `psum over i: float32[3]`.

    A constraint on how a value lies may become a collective.
    """
    return list(_collectives(jaxpr))


def with_collectives(fingerprint: Fingerprint, moves: Sequence[str]) -> Fingerprint:
    """The same, with the collectives of the program."""
    numbered = {f"collective {number}": text for number, text in enumerate(moves, 1)}
    return fingerprint._replace(leaves={**fingerprint.leaves, **numbered})


def _collectives(jaxpr: ClosedJaxpr) -> Iterator[str]:
    for eqn in equations(jaxpr):
        name = eqn.primitive.name
        named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        named = named if isinstance(named, tuple | list) else (named,)
        over = [axis for axis in named if not isinstance(axis, int) and axis is not None]
        if name == "sharding_constraint" or (over and name not in _LOCAL):
            types = ", ".join(describe(var.aval) for var in eqn.invars)
            where = f" over {', '.join(map(str, over))}" if over else ""
            yield f"{name}{where}: {types}"


def _fingerprint(options: Options, call: Call, body: Body, layout: Layout) -> Fingerprint:
    """The arguments as the user passes them, and the whole result."""
    leaves = {}
    for path, leaf, axis in zip(call.paths(), call.leaves, call.axes, strict=True):
        leaves[path] = _as_passed(leaf, axis, layout if options.arrays == "local" else None)
    for number, value in zip(options.static, call.static, strict=True):
        leaves[f"static argument {number}"] = describe(value)
    flat, structure = jax.tree.flatten_with_path(body.result(layout.size))
    for path, leaf in flat:
        leaves[f"result{jax.tree_util.keystr(path)} of all processes"] = describe(leaf)
    return Fingerprint(containers(structure), leaves)


def _as_passed(leaf: Any, axis: Axis, layout: Layout | None) -> str:
    kind = type_of(leaf)
    shape = list(kind.shape)
    if axis is not None and layout is not None:
        shape[axis] //= layout.processes
    return describe(jax.ShapeDtypeStruct(shape, kind.dtype, weak_type=kind.weak_type))
