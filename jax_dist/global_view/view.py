"""A step that was written for pmap, on global arrays."""

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import jax
from jax.sharding import Mesh

from jax_dist._calls import definition
from jax_dist._passes.captures import Captures, Watch, is_lifted_outside
from jax_dist._pmap import axes, meshes
from jax_dist._pmap.axes import AxisPrefix
from jax_dist._pmap.call import MappedCall, any_tracer
from jax_dist._pmap.options import PmapOptions
from jax_dist._pmap.placement import check_runs
from jax_dist.errors import ArgumentError, ArgumentTypeError, DeviceCountError
from jax_dist.global_view import placement
from jax_dist.global_view.placement import Setting, Shardings
from jax_dist.global_view.programs import ViewPrograms
from jax_dist.global_view.report import GlobalViewReport

_P = ParamSpec("_P")
_R = TypeVar("_R")


def global_view(
    fun: Callable[_P, _R],
    axis_name: Hashable,
    *,
    in_axes: AxisPrefix = 0,
    out_axes: AxisPrefix = 0,
    state: int | Sequence[int] | None = 0,
    mesh: Mesh | None = None,
    mesh_axes: Sequence[Hashable] | None = None,
    shardings: Shardings = "replicated",
    static_broadcasted_argnums: int | Iterable[int] = (),
    donate_argnums: int | Iterable[int] = (),
    gradients: Literal["scatter", "reduce"] = "scatter",
    regather: bool = False,
    captures: Captures = "lift",
) -> "GlobalView[_P, _R]":
    """Run a step that was written for pmap on global arrays, with a sharded state.

    Values that are the same on all devices are computed on global arrays, what varies in
    `shard_map`; so shardings alone say where the state is. A leaf of the state that the step makes
    vary, as unsynchronized statistics, keeps one value for each device, as under pmap.

    Args:
      fun: the step of one device, with its collectives.
      axis_name: the mapped axis.
      in_axes: as for pmap; ignored for the state, of which a leaf is `[*s]`, or `[N, *s]` if it
        varies.
      out_axes: as for pmap; 0 gives `[N, *s]`, None the one value that all devices have. Ignored
        for the state.
      state: the position of the argument that is carried from call to call, or several; the
        results of the same structure are its new value. None, if nothing is carried.
      mesh: by default all devices in a row. What is computed with leaves that are sharded over
        other axes than the mapped one, the model axes, is sharded over them, too.
      mesh_axes: the axes of the mesh that the mapped axis is, outermost first; by default the one
        of its name. Batches are sharded over all of them.
      shardings: "replicated"; "fsdp", which shards the longest dimension that the devices divide,
        of leaves from 1024 elements on, over the last of `mesh_axes`; or a function of the path of
        a leaf, as in "params/w", and its type, that gives a `PartitionSpec`.
      static_broadcasted_argnums: positions of arguments that are compile-time constants.
      donate_argnums: positions of arguments whose memory the results may use; give the state.
      gradients: "scatter" lets a sum over devices be scattered where its result is sharded, and
        sums over shards, as in the norm of all gradients, be taken in another order. "reduce" takes
        each sum in pmap's order; devices along model axes then compute the same.
      regather: gather shards each time that they are read: in the forward and again in the backward
        pass, and in each iteration of a scan over layers. It takes less memory, and sends more.
      captures: as for pmap, for arrays that `fun` captures: "lift", "warn", "error" or "allow".

    Returns:
      An object that is called like the step.

    Raises:
      ArgumentTypeError: `gradients` or `shardings` is none of its choices.
      DeviceCountError: the mesh has no such axes.
      NotImplementedError: when called, the step maps inside, or shards over the mapped axis itself.
      ArgumentError: when called, a leaf that varies was to be sharded (the message has the line
        where it began to), or there are captured arrays, and `captures` is "error".

    >>> import jax, jax.numpy as jnp
    >>> def step(w, x):
    ...     gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    ...     return w - 0.1 * jax.lax.pmean(gradient, "batch")
    >>> view = global_view(step, "batch", shardings="fsdp")
    >>> w = view.place(jnp.ones((256, 8)))
    >>> w = view(w, view.place_batch(jnp.ones((64, 256))))
    >>> w.shape, w.addressable_shards[0].data.shape
    ((256, 8), (32, 8))
    """
    if not callable(fun):
        raise ArgumentTypeError(f"global_view takes a function, not {fun!r}.")
    if gradients not in ("scatter", "reduce"):
        raise ArgumentTypeError(f"gradients must be 'scatter' or 'reduce', not {gradients!r}.")
    if not callable(shardings) and shardings not in ("replicated", "fsdp"):
        raise ArgumentTypeError(
            "shardings must be 'replicated', 'fsdp', or a function of a path and a type that gives "
            f"a PartitionSpec, not {shardings!r}."
        )
    mapped = (axis_name,) if mesh_axes is None else tuple(mesh_axes)
    names = mapped[:1] if mesh is None else mesh.axis_names
    is_each_once = len({*mapped} & {*names}) == len(mapped)
    if not mapped or not is_each_once:
        has = "there is no mesh=" if mesh is None else f"mesh.axis_names is {tuple(names)}"
        raise DeviceCountError(
            f"The mesh of a global view needs the axes {mapped!r}, each once, but {has}. Name one "
            f"so, as in Mesh(devices, ({axis_name!r},)), or give mesh_axes=."
        )
    options = PmapOptions(
        fun_name=axes.function_name(fun),
        axis_name=axis_name,
        in_axes=in_axes,
        out_axes=out_axes,
        static=axes.argument_numbers("static_broadcasted_argnums", static_broadcasted_argnums),
        donated=axes.argument_numbers("donate_argnums", donate_argnums),
        captures=captures,
    )
    numbers = axes.argument_numbers("state", () if state is None else state)
    setting = Setting(options, mapped, numbers, mesh, shardings, gradients == "scatter", regather)
    return GlobalView(fun, setting)


class GlobalView(Generic[_P, _R]):
    """A step on global arrays; made by `jax_dist.global_view`."""

    def __init__(self, fun: Callable[_P, _R], setting: Setting):
        self._fun, self._setting = fun, setting
        self._programs = ViewPrograms(fun, setting)
        self._watch = Watch(setting.options.fun_name)
        functools.update_wrapper(self, fun, updated=())

    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Run the step.

        Args:
          *args: the state as `place` or the last call gave it, or as it is on one device; and the
            others as pmap takes them.
          **kwargs: mapped over their first dimension, as under pmap.

        Returns:
          The results of the step; the new state as it is kept, others by out_axes.

        Raises:
          ArgumentError: the state is sharded otherwise, or is stacked over devices.
        """
        call = self._bind(args, kwargs)
        is_traced = any_tracer(call.leaves)  # the call is part of a jit or another transformation
        if not is_traced:
            self._check_runs("a call")
        program = self._programs.program_for(call)
        # Captured arrays become inputs ("lifted"). In an outer trace they are constants all the
        # same, unless the outer program lifts them.
        if not (is_traced and is_lifted_outside()):
            self._watch.warn_of(program.traced.lifted.captures, lifted=not is_traced)
        with self._context(traced=is_traced):
            return program.run(call)

    def __repr__(self) -> str:
        where = definition(self._fun)
        name = f"{self._setting.options.fun_name}{f' at {where}' if where else ''}"
        return f"<jax_dist.global_view of {name}>"

    def place(self, state: Any, *rest: Any, stacked: Any = None) -> Any:
        """Place a state on the devices as the step keeps it.

        Args:
          state: arrays as on one device, `[*s]`, or, with `stacked`, `[N, *s]` as pmap has them.
            Several arguments are a tuple. Several processes give the same, or their slices.
          *rest: the other arguments of a call, or their types. Then a leaf that the step makes
            differ between devices is placed as `[N, *s]`, else as `[*s]` until the first call.
          stacked: whether the state is `[N, *s]`: True, False, or a tree of them as the state, or
            the start of one; by default only what an earlier call keeps so. A leaf whose slices
            differ in a bit varies.

        Returns:
          The state, on the mesh, in memory of its own.

        Raises:
          ArgumentError: a leaf whose slices differ was to be sharded, or the state is not stacked
            as it is said to be.
        """
        self._check_runs("place")
        numbers = self._setting.state  # the positions of the arguments that are state
        parts = tuple(state) if len(numbers) > 1 else (state,)
        is_flag_each = len(parts) > 1 and isinstance(stacked, tuple)
        flags = stacked if is_flag_each else (stacked,) * len(parts)
        if not len(numbers) == len(parts) == len(flags):
            raise ArgumentError(
                f"place takes a state of {len(numbers)} arguments, not {len(parts)}."
            )
        with self._context(traced=False):
            types = list(map(self._programs.register_state, numbers, parts, flags))
            if rest:  # trace the step for these arguments, to know which leaves vary
                args = list(rest)
                for state_type in types:  # in the order of their positions
                    args.insert(state_type.argument, state_type.tree)
                self._programs.program_for(self._bind(tuple(args), {}))
            placed = list(map(self._programs.place_state, types, parts))
        return tuple(placed) if len(placed) > 1 else placed[0]

    def place_batch(self, batch: Any) -> Any:
        """Shard a batch over the devices.

        Args:
          batch: arrays `[L, b, ...]` for the L devices of this process, as pmap takes them, or, if
            the first dimension is not L, the rows of this process, `[B, ...]`.

        Returns:
          Global arrays `[N, b, ...]`.

        Raises:
          ArgumentError: an array has no rows, or the devices do not divide them.
        """
        self._check_runs("place_batch")
        return placement.place_batch(batch, self._setting.axes)

    @property
    def shardings(self) -> Any:
        """The shardings of the state: a tree of `NamedSharding`, or a tuple of trees."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.types)

    @property
    def types(self) -> Any:
        """The types of the state with shardings, as a checkpoint is read into."""
        return self._programs.types()

    def lower(self, /, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lower the step for arguments, or their types, as `jax.jit(...).lower` does."""
        call = self._bind(args, kwargs)
        program = self._programs.program_for(call)
        with self._context(traced=any_tracer(call.leaves)):
            return program.lower(call.leaves)

    def report(self) -> GlobalViewReport:
        """Return the facts about each leaf of the state, and how the step runs."""
        return self._programs.known_program("report").report

    def _bind(self, args: tuple, kwargs: dict) -> MappedCall:
        call = MappedCall.bind(self._setting.options, self._fun, args, kwargs)
        if (number := max(self._setting.state, default=-1)) >= len(args):
            raise ArgumentError(
                f"'{call.fun_name}' was called with {len(args)} positional arguments, and its "
                f"state is at position {number}. Give the position by state=, or state=None for a "
                "function that carries nothing."
            )
        return call

    def _check_runs(self, what: str) -> None:
        name = f"{what} of the global view of '{self._setting.options.fun_name}'"
        check_runs(self._setting.axes.mesh.devices.flat[:1], name)

    def _context(self, *, traced: bool) -> Any:
        """Return a context that replaces a mesh that the user has set by the view's, or by none."""
        return meshes.context_of(self._setting.axes.mesh) if traced else meshes.no_mesh()
