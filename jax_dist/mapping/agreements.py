"""With several processes, a new program is agreed upon before it first runs.

Processes that run programs with other shapes, or the same ones in another order, get wrong numbers
or hang. So before a signature is called for the first time, they compare it. A program without
collectives runs in one process alone as well, and is not compared.

It is decided in the trace. But JAX remembers traces, also those of `lower` or of a `jit` around,
which one process may make alone. Such a signature stays open until it is called.
"""

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr

from jax_dist import _compat
from jax_dist.mapping.axes import Axis
from jax_dist.mapping.calls import Call, Options
from jax_dist.mapping.meshes import Layout
from jax_dist.multihost import agreeing
from jax_dist.multihost.fingerprints import Fingerprint, containers, describe
from jax_dist.passes.interpreter import equations

_LOCAL = ("axis_index", "pcast", "pvary")  # they name a mesh axis, and move nothing
_DO = (
    "Call the same mapped functions in all processes, in the same order, with arguments of the "
    "same shapes. What one process computes alone belongs on jax.local_devices()."
)


class _Signature(NamedTuple):
    """What a call looks like, as far as programs depend on it."""

    structure: Any
    leaves: tuple[tuple, ...]  # shape, dtype, weak type
    static: tuple[Any, ...]


class _Program(NamedTuple):
    """One that all processes should have."""

    fingerprint: Fingerprint
    ranks: tuple[int, ...]


class Agreements:
    """Those of one mapped function.

    Attributes:
      open: programs that were traced, and not called yet.
    """

    def __init__(self, options: Options, fun: Callable[[], Callable]):
        """
        Args:
          options: what was said to pmap.
          fun: gives the function.
        """
        self._options, self._fun = options, fun
        self._agreed: set[int] = set()  # hashes of signatures: no object is kept alive
        self._traced: tuple[_Signature, Fingerprint, tuple[int, ...]] | None = None
        self.open: dict[_Signature, _Program] = {}

    def traced(self, args: tuple, kwargs: dict, call: Call, output: Any, layout: Layout) -> None:
        """The function was traced on these tracers."""
        fingerprint = _fingerprint(self._options, args, call, output, layout)
        self._traced = (self._signature(args, kwargs), fingerprint, processes_of(layout.mesh))

    def look(self, jaxpr: ClosedJaxpr, *, called: bool) -> None:
        """This is what the trace gave.

        Args:
          jaxpr: of the function.
          called: whether the program runs next.

        Raises:
          DisagreementError: other processes are about to run another one.
        """
        moves = collectives(jaxpr)
        if self._traced is None or not moves:
            return
        signature, fingerprint, ranks = self._traced
        if hash(signature) in self._agreed:
            return
        self.open[signature] = _Program(with_collectives(fingerprint, moves), ranks)
        if called:
            self._settle(signature)

    def before(self, args: tuple, kwargs: dict) -> None:
        """Before a call whose trace may be known already."""
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((args, kwargs))):
            return
        signature = self._signature(args, kwargs)
        if signature in self.open:
            self._settle(signature)

    def _settle(self, signature: _Signature) -> None:
        program = self.open[signature]
        agree_to_run(f"pmap of {described(self._fun())}", program.fingerprint, program.ranks)
        self._agreed.add(hash(signature))
        del self.open[signature]

    def _signature(self, args: tuple, kwargs: dict) -> _Signature:
        static = self._options.static
        mapped = [arg for number, arg in enumerate(args) if number not in static]
        leaves, structure = jax.tree.flatten((mapped, kwargs))
        avals = [jax.typeof(leaf) for leaf in leaves]
        return _Signature(
            structure,
            tuple((aval.shape, aval.dtype, aval.weak_type) for aval in avals),
            tuple(args[number] for number in static if number < len(args)),
        )


def agree_to_run(name: str, fingerprint: Fingerprint, ranks: Sequence[int]) -> None:
    """Before these processes run a program for the first time.

    Raises:
      DisagreementError: they are about to run different ones.
      MissingRanksError: some of them did not come.
    """
    if _compat.joined_as() is None:  # nothing to compare over
        return
    agreeing.agree_on(name, fingerprint, timeout=agreeing.program_timeout, ranks=ranks, do=_DO)


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


def _fingerprint(
    options: Options, args: tuple, call: Call, output: Any, layout: Layout
) -> Fingerprint:
    """The arguments as the user passes them, and the whole result."""
    leaves = {}
    for path, leaf, axis in zip(call.paths(), call.leaves, call.axes, strict=True):
        leaves[path] = _as_passed(leaf, axis, layout if options.arrays == "local" else None)
    for number in options.static:
        leaves[f"static argument {number}"] = describe(args[number])
    flat, structure = jax.tree.flatten_with_path(output)
    for path, leaf in flat:
        leaves[f"result{jax.tree_util.keystr(path)} of all processes"] = describe(leaf)
    return Fingerprint(containers(structure), leaves)


def _as_passed(leaf: Any, axis: Axis, layout: Layout | None) -> str:
    shape = list(jnp.shape(leaf))
    if axis is not None and layout is not None:
        shape[axis] //= layout.processes
    aval = jax.typeof(leaf)
    return describe(aval.update(shape=tuple(shape)) if shape != list(aval.shape) else aval)
