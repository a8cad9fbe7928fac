"""Training steps taken out of programs, to be mapped again over the devices of other machines.

A step is a function under pmap with the types of its arguments. It is traced and lowered, and never
runs. `find_step` runs a program and watches its calls of `jax.pmap` and `jax_dist.pmap`;
`MappedStep.find` traces one function up to the pmap in it.
"""

import contextlib
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np

from jax_dist import _compat
from jax_dist._pmap import axes
from jax_dist._pmap.call import MappedCall, any_tracer, type_of
from jax_dist._pmap.options import PmapOptions
from jax_dist.errors import ArgumentError
from jax_dist.global_view.view import global_view
from jax_dist.pmap import Mapped, pmap
from jax_dist.topology import Topology


class _StepReached(BaseException):
    """Ends a program at its step; an `except Exception` of the program does not catch it."""


class _PmapTraced(BaseException):
    """Ends a trace at its first `jax.pmap`; it holds that pmap and the types of its leaves."""


@dataclasses.dataclass(frozen=True, slots=True)
class MappedStep:
    """A function under pmap, with the options of the pmap and the types of its arguments."""

    options: PmapOptions
    call: MappedCall
    slices: tuple[jax.ShapeDtypeStruct, ...]  # the slice on one device of each argument leaf
    axes: tuple[int | None, ...]  # the mapped dimension of each argument leaf, not negative

    @property
    def name(self) -> str:
        """Return the name of the function."""
        return self.call.fun_name

    @classmethod
    def find(cls, fun: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "MappedStep":
        """Return the step of a mapped function, or of the first pmap that `fun` calls.

        Raises NotImplementedError if it maps nothing, MappedAxisError if the sizes differ.
        """
        mapped = fun if isinstance(fun, Mapped) else getattr(fun, "__wrapped__", None)
        if isinstance(mapped, Mapped):
            options = mapped._dispatcher.options
            call = MappedCall.bind(options, mapped.__wrapped__, args, kwargs)
        else:
            options, call = _intercept_pmap(fun, args, kwargs)
        _ = call.size  # raises if the sizes of the mapped axis differ
        return cls(options, call, tuple(call.slices()), tuple(call.dims))

    def leaves(self, devices: int, unstacked: Sequence[int] = ()) -> list[jax.ShapeDtypeStruct]:
        """Return the types of the argument leaves: slices `[2, 3]` are `[8, 2, 3]` for 8 devices.

        Those of the arguments at the positions `unstacked` stay `[2, 3]`.
        """
        types = []
        for leaf, axis, argument in zip(self.slices, self.axes, self.call.owners, strict=True):
            stacking_axis = None if argument in unstacked else axis
            types.append(type_of(leaf, axes.stack(leaf.shape, stacking_axis, devices)))
        return types

    def map_by(self, pmap: Callable[..., Any], devices: Sequence[Any]) -> Any:
        """Map the step over other devices by `pmap`, as a function of the argument leaves."""

        def step_of_leaves(*leaves: Any) -> Any:
            return self.call.run(leaves)

        step_of_leaves.__name__ = step_of_leaves.__qualname__ = self.name
        step_of_leaves.__wrapped__ = self.call.fun  # pyright: ignore[reportFunctionMemberAccess]
        options, owners = self.options, self.call.owners
        return pmap(
            step_of_leaves,
            options.axis_name,
            in_axes=self.axes,
            out_axes=options.out_axes,
            donate_argnums=[n for n, owner in enumerate(owners) if owner in options.donated],
            devices=list(devices),
        )

    def state(self, devices: int) -> tuple[int, ...]:
        """Return the positions of the state: the first arguments that have the type of a result."""
        axis_env = [(self.options.mesh_axis, devices)]
        trace = jax.make_jaxpr(self.call.run, axis_env=axis_env, return_shape=True)
        _, results = trace(self.slices)
        result_types = [_tree_type(results)]
        if isinstance(results, tuple | list):
            result_types += [_tree_type(result) for result in results]
        positions = []
        for position, arg in enumerate(self.call.rebuild(self.slices)[0]):
            if position in self.options.static:
                continue
            arg_type = _tree_type(arg)
            if arg_type in result_types and jax.tree.leaves(arg):
                result_types.remove(arg_type)
                positions.append(position)
            elif positions:  # an argument after the state, such as a batch; a later match is chance
                break
        return tuple(positions)

    def lower(
        self, strategy: str, machine: Topology, state: Sequence[int] | None
    ) -> jax.stages.Lowered:
        """Lower the step by one of the `plan.STRATEGIES`; `state=None` means `self.state`."""
        count, options = len(machine.devices), self.options
        if strategy in ("jax.pmap", "jax_dist.pmap"):
            mapping = jax.pmap if strategy == "jax.pmap" else pmap
            return self.map_by(mapping, machine.devices).lower(*self.leaves(count))
        # In the others, those of `global_view`, state arguments have no dimension of devices.
        state = self.state(count) if state is None else tuple(state)
        if not state:
            raise ArgumentError(
                f"'{self.name}' carries no state: no argument has the tree, shapes and types of a "
                "result. Give its position by state=."
            )
        args, kwargs = self.call.rebuild(self.leaves(count, unstacked=state))
        dynamic_args = [None if n in options.static else arg for n, arg in enumerate(args)]
        devices, mesh_axes = np.array(machine.devices), (options.mesh_axis,)
        if strategy == "hsdp":  # the state is sharded in a host, and replicated over hosts
            devices, mesh_axes = devices.reshape(machine.hosts, -1), ("hosts", "devices")
        view = global_view(
            self.call.fun,
            options.mesh_axis,
            in_axes=_axes_of_arguments(dynamic_args, self.axes),
            out_axes=options.out_axes,
            state=state,
            mesh=_compat.auto_mesh(devices, mesh_axes),
            mesh_axes=mesh_axes,
            static_broadcasted_argnums=options.static,
            donate_argnums=options.donated,
            shardings="replicated" if strategy == "replicated" else "fsdp",
            regather=strategy == "fsdp-regather",
        )
        return view.lower(*args, **kwargs)


def _tree_type(tree: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    """Return the type of a tree: its structure, and the shape and dtype of each leaf."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _axes_of_arguments(args: Sequence[Any], leaf_axes: Sequence[axes.Axis]) -> tuple[Any, ...]:
    """Return for each argument the axis of its leaves, or a tree of axes if they have several.

    A tree of axes is built by the classes of the argument, some of which take only arrays.
    """
    in_axes, remaining = [], iter(leaf_axes)
    for arg in args:
        leaves, structure = jax.tree.flatten(arg)
        arg_axes = [*itertools.islice(remaining, len(leaves))]
        is_one = len({*arg_axes}) == 1
        in_axes.append(arg_axes[0] if is_one else jax.tree.unflatten(structure, arg_axes))
    return tuple(in_axes)


def _intercept_pmap(fun: Callable, args: tuple, kwargs: dict) -> tuple[PmapOptions, MappedCall]:
    """Trace `fun` up to the first call of a `jax.pmap`; return the pmap's options and that call."""
    name = axes.function_name(fun)
    leaves, tree = jax.tree.flatten((args, kwargs))
    # Only arrays are traced; any other leaf may be a static argument.
    arrays = {index: type_of(leaf) for index, leaf in enumerate(leaves) if hasattr(leaf, "shape")}

    def call_fun(tracers: dict[int, Any]) -> None:
        values = [tracers.get(index, leaf) for index, leaf in enumerate(leaves)]
        traced_args, traced_kwargs = jax.tree.unflatten(tree, values)
        fun(*traced_args, **traced_kwargs)

    def end_trace(intercepted: Any, mapped_leaves: Sequence[Any]) -> Any:
        raise _PmapTraced(intercepted, [type_of(jax.typeof(leaf)) for leaf in mapped_leaves])

    try:
        # NameError: a collective outside of any pmap has an unbound axis name.
        with _compat.intercept_pmaps(end_trace), contextlib.suppress(NameError):
            jax.eval_shape(call_fun, arrays)
    except _PmapTraced as end:
        intercepted, mapped_types = end.args  # the pmap, and the types of its flat arguments
    else:
        raise NotImplementedError(
            f"'{name}' maps nothing. Give the mapped function, as in jax.pmap(step, axis_name='i')."
        )

    def call_mapped_function(*args: Any, **kwargs: Any) -> Any:
        return intercepted.fun(*args, **kwargs)

    mapped_args, mapped_kwargs = jax.tree.unflatten(intercepted.in_tree, mapped_types)
    in_axes = _axes_of_arguments(mapped_args, intercepted.in_axes)
    mapped_axes = {"in_axes": in_axes, "out_axes": intercepted.out_axes}
    options = PmapOptions(name, intercepted.axis_name, **mapped_axes)
    call = MappedCall.bind(options, call_mapped_function, mapped_args, mapped_kwargs)
    # JAX says for each leaf if it is donated. An argument, given by its position, is if all its
    # leaves are; `call.owners` has the argument of each leaf.
    flags = zip(call.owners, intercepted.donated, strict=True)
    kept = {argument for argument, is_donated in flags if not is_donated}
    donated = tuple(owner for owner in {*call.owners} - kept if isinstance(owner, int))
    return dataclasses.replace(options, donated=donated), call


def find_step(program: Callable[[], object], name: str | None = None) -> MappedStep:
    """Run a program until it calls its training step, and return the step.

    That is the mapped function of this name, by default the first that carries state and has other
    arguments, such as a batch. Raises NotImplementedError if the program ends or raises before.
    """
    steps: list[MappedStep] = []
    called: dict[Callable, str] = {}  # the mapped functions that were called, with their names

    def check_call(function: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        """End the program if this call is its step, or another step, which would train on."""
        if function in called:
            return
        called[function] = axes.function_name(function)
        step = MappedStep.find(function, args, kwargs)
        state = step.state(jax.local_device_count())
        is_training_step = bool(state and set(step.call.owners) - set(state))
        if (name is None and is_training_step) or name == called[function]:
            steps.append(step)
        if steps or is_training_step:
            raise _StepReached

    end, cause = "ended", None
    with contextlib.ExitStack() as stack:
        for module in (jax, sys.modules["jax_dist"]):
            watched_pmap = _watch_calls(module.pmap, check_call)
            stack.enter_context(mock.patch.object(module, "pmap", watched_pmap))
        try:
            program()
        except (Exception, SystemExit, _StepReached) as error:  # noqa: BLE001  # reported below
            cause = error
            end = "trains" if isinstance(error, _StepReached) else f"raised {error!r}"
    if steps:  # also if the program caught `_StepReached`
        return steps[0]
    what = f"'{name}'" if name else "a training step, which takes a state and gives it back"
    raise NotImplementedError(
        f"The program {end}, and did not call {what}. Mapped functions that it called: "
        f"{', '.join(called.values()) or 'none'}."
    ) from cause


def _watch_calls(pmap: Callable, check_call: Callable[[Callable, tuple, dict], None]) -> Callable:
    """Return `pmap` whose mapped functions call `check_call` first, unless they are traced."""

    def watched_pmap(*args: Any, **options: Any) -> Any:
        if not args and "fun" not in options:  # used as a decorator with options
            return functools.partial(watched_pmap, **options)
        mapped_function = pmap(*args, **options)

        @functools.wraps(mapped_function)
        def watched_function(*args: Any, **kwargs: Any) -> Any:
            if not any_tracer(jax.tree.leaves((args, kwargs))):
                check_call(mapped_function, args, kwargs)
            return mapped_function(*args, **kwargs)

        watched_function.lower = mapped_function.lower  # pyright: ignore[reportAttributeAccessIssue]
        return watched_function

    return watched_pmap
