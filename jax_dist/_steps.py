"""The function of one device in a mapped step, and the step that a program calls.

A step is mapped again over other devices, or placed by `global_view`; nothing of it runs.
"""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np

from jax_dist import _compat
from jax_dist._pmap import axes
from jax_dist._pmap.body import Call, Options, any_tracer, type_of
from jax_dist.errors import ArgumentError
from jax_dist.global_view.view import global_view
from jax_dist.pmap import Mapped, pmap
from jax_dist.topology import Topology


class _Found(BaseException):
    """The end of a trace or a program that has shown its step; `except Exception` lets it pass."""


@dataclasses.dataclass(frozen=True, slots=True)
class MappedStep:
    """A function of one device, and how it is mapped."""

    options: Options
    call: Call
    slices: tuple[jax.ShapeDtypeStruct, ...]  # what one device gives for each leaf of the arguments
    axes: tuple[int | None, ...]  # the mapped dimension of each leaf, from the left

    @property
    def name(self) -> str:
        """Return the name of the function."""
        return self.call.fun_name

    @classmethod
    def of(cls, fun: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "MappedStep":
        """Return the step in a mapped function, or the first that a larger function calls.

        Raises NotImplementedError if it maps nothing, MappedAxisError if the sizes differ.
        """
        inner = fun if isinstance(fun, Mapped) else getattr(fun, "__wrapped__", None)
        if isinstance(inner, Mapped):
            options = inner._dispatcher.options
            call = Call.bind(options, inner.__wrapped__, args, kwargs)
        else:
            options, call = _intercept_pmap(fun, args, kwargs)
        _ = call.size  # raises if the sizes differ
        return cls(options, call, tuple(call.slices()), tuple(call.dims))

    def leaves(self, devices: int, whole: Sequence[int] = ()) -> list[jax.ShapeDtypeStruct]:
        """Return the types of the leaves, `[N, *s]`; of the arguments `whole`, `[*s]`."""
        triples = zip(self.slices, self.axes, self.call.owners, strict=True)
        return [
            type_of(leaf, axes.stacked(leaf.shape, None if owner in whole else dim, devices))
            for leaf, dim, owner in triples
        ]

    def mapped(self, pmap: Callable[..., Any], devices: Sequence[Any]) -> Any:
        """Return the step mapped over devices, a function of leaves."""

        def of_leaves(*leaves: Any) -> Any:
            return self.call.run(leaves)

        of_leaves.__name__ = of_leaves.__qualname__ = self.name
        of_leaves.__wrapped__ = self.call.fun  # pyright: ignore[reportFunctionMemberAccess]
        options, owners = self.options, enumerate(self.call.owners)
        return pmap(
            of_leaves,
            options.axis_name,
            in_axes=self.axes,
            out_axes=options.out_axes,
            donate_argnums=tuple(n for n, owner in owners if owner in options.donated),
            devices=list(devices),
        )

    def state(self, devices: int) -> tuple[int, ...]:
        """Return the positions of the first arguments whose tree, shapes and types come back.

        What comes back after an argument that does not may be anything.
        """
        axis_env = [(self.options.mesh_axis, devices)]
        trace = jax.make_jaxpr(self.call.run, axis_env=axis_env, return_shape=True)
        _, results = trace(self.slices)
        parts = [results, *results] if isinstance(results, tuple | list) else [results]
        types = lambda tree: [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]
        kind_of = lambda tree: (jax.tree.structure(tree), types(tree))
        kinds = [kind_of(part) for part in parts]
        positions = []
        for position, arg in enumerate(self.call.rebuild(self.slices)[0]):
            if position in self.options.static:
                continue
            kind = kind_of(arg)
            if kind in kinds and jax.tree.leaves(arg):
                kinds.remove(kind)
                positions.append(position)
            elif positions:
                break
        return tuple(positions)

    def lower(
        self, strategy: str, machine: Topology, state: Sequence[int] | None
    ) -> jax.stages.Lowered:
        """Return the program of the step with one of the `STRATEGIES`."""
        count, options = len(machine.devices), self.options
        if strategy.endswith(".pmap"):
            function = jax.pmap if strategy == "jax.pmap" else pmap
            return self.mapped(function, machine.devices).lower(*self.leaves(count))
        carried = self.state(count) if state is None else tuple(state)
        if not carried:
            raise ArgumentError(
                f"'{self.name}' carries no state: no argument has the tree, shapes and types of a "
                "result. Give its position by state=."
            )
        args, kwargs = self.call.rebuild(self.leaves(count, whole=carried))
        dims, _ = self.call.rebuild(self.axes)
        devices, names = np.array(machine.devices), (options.mesh_axis,)
        if strategy == "hsdp":
            devices, names = devices.reshape(machine.hosts, -1), ("hosts", "devices")
        view = global_view(
            self.call.fun,
            options.mesh_axis,
            in_axes=tuple(None if n in options.static else dim for n, dim in enumerate(dims)),
            out_axes=options.out_axes,
            state=carried,
            mesh=_compat.auto_mesh(devices, names),
            mesh_axes=names,
            static_broadcasted_argnums=options.static,
            donate_argnums=options.donated,
            shardings="replicated" if strategy == "replicated" else "fsdp",
            regather=strategy == "fsdp-regather",
        )
        return view.lower(*args, **kwargs)


def _intercept_pmap(fun: Callable, args: tuple, kwargs: dict) -> tuple[Options, Call]:
    """Return the options and the call of the first `jax.pmap` in a function."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    types = {n: type_of(leaf) for n, leaf in enumerate(leaves) if hasattr(leaf, "shape")}

    def intercept(taken: Any, mapped: Sequence[Any]) -> Any:
        raise _Found(taken, [type_of(jax.typeof(leaf)) for leaf in mapped])

    def traced(arrays: dict[int, Any]) -> None:
        values = [arrays.get(n, leaf) for n, leaf in enumerate(leaves)]  # others may be static
        positional, keywords = jax.tree.unflatten(tree, values)
        fun(*positional, **keywords)

    name = axes.function_name(fun)
    try:
        with _compat.intercept_pmaps(intercept), contextlib.suppress(NameError):
            jax.eval_shape(traced, types)
    except _Found as found:
        taken, mapped_types = found.args
    else:  # nothing was mapped, or a collective stands outside of any map
        raise NotImplementedError(
            f"'{name}' maps nothing. Give the mapped function, as in jax.pmap(step, axis_name='i')."
        )
    of_device = lambda *args, **kwargs: taken.fun(*args, **kwargs)
    call = Call.of_taken(taken, mapped_types, of_device, name)
    pairs = zip(call.owners, taken.donated, strict=True)
    live = {owner for owner, is_donated in pairs if not is_donated}
    donated = tuple(n for n in {*call.owners} - live if isinstance(n, int))
    return Options(name, taken.axis_name, out_axes=taken.out_axes, donated=donated), call


def find_step(program: Callable[[], object], name: str | None = None) -> MappedStep:
    """Run a program until it calls its training step, and return the step.

    It is the function of this name that `jax.pmap` or `jax_dist.pmap` maps; without a name, the
    first that takes what one of its results is like, and something else, as a batch. Raises
    NotImplementedError if the program ended, or raised, before it called such a function.
    """
    steps: list[MappedStep] = []
    called: dict[Callable, str] = {}  # by mapped function, its name

    def check(function: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        """End the program if this call is its step; under another name, it trains to its end."""
        if function in called:
            return
        called[function] = axes.function_name(function)
        step = MappedStep.of(function, args, kwargs)
        state = step.state(jax.local_device_count())
        trains = bool(state and {*step.call.owners} - {*state})
        if name == called[function] or (name is None and trains):
            steps.append(step)
        if steps or trains:
            raise _Found

    end, cause = "ended", None
    with contextlib.ExitStack() as stack:
        for home in (jax, sys.modules["jax_dist"]):  # where programs find it
            stack.enter_context(mock.patch.object(home, "pmap", _watch(home.pmap, check)))
        try:
            program()
        except (Exception, SystemExit, _Found) as error:  # noqa: BLE001  # reported below
            cause = error
            end = "trains" if isinstance(error, _Found) else f"raised {error!r}"
    if steps:  # even if the program caught what was to end it
        return steps[0]
    what = f"'{name}'" if name else "a training step, which takes a state and gives it back"
    raise NotImplementedError(
        f"The program {end}, and did not call {what}. Mapped functions that it called: "
        f"{', '.join(called.values()) or 'none'}."
    ) from cause


def _watch(pmap: Callable, check: Callable[[Callable, tuple, dict], None]) -> Callable:
    """Return a `pmap` whose functions are checked before each call."""

    def watched_pmap(*args: Any, **kwargs: Any) -> Any:
        if not args and "fun" not in kwargs:
            return functools.partial(watched_pmap, **kwargs)
        function = pmap(*args, **kwargs)

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not any_tracer(jax.tree.leaves((args, kwargs))):  # else a part of what is compiled
                check(function, args, kwargs)
            return function(*args, **kwargs)

        watched.lower = function.lower  # pyright: ignore[reportAttributeAccessIssue]
        return watched

    return watched_pmap
