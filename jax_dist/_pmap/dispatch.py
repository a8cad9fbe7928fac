"""The calls of a mapped function.

A call is in one of four states:

- *steady*: a front (see `_compat.fronts`) knows the signature, and runs its program in C++;
- *first sight*: the front does not know the signature, so the call comes to `_first_sight`: the
  body is traced, the arguments are put on the mesh, and the front learns how to run such a call;
- *with care*: an array lies where the program cannot take it. The front learns nothing: each such
  call comes here, is moved (an array that lives on, once), and goes to the front again;
- *several processes*: see `process_calls`; what it makes of the arguments goes to the front.

Everything is on the mesh before a program is called, so there is one program for a shape, wherever
the arguments come from: a training loop compiles once. What is traced outside (under jit, grad,
vmap) is staged, with its arguments as they are.
"""

import collections
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._exceptions import text_of
from jax_dist._pmap import axes, emission, meshes, placement, region
from jax_dist._pmap.body import Body, Call, Options, any_tracer, check_static, tracer, type_of
from jax_dist._pmap.collectives import AxisPlace
from jax_dist._pmap.emission import KnownSignature
from jax_dist._pmap.meshes import InnerAxis, Layout
from jax_dist._rewrite import programs
from jax_dist._rewrite.constants import put_copy
from jax_dist._rewrite.pipeline import warn_user
from jax_dist._rewrite.programs import Bound, Program, Programs
from jax_dist.errors import NestingError, PlacementError, message, refusal

if TYPE_CHECKING:
    from jax_dist._pmap.process_calls import ProcessCalls


class Dispatcher:
    """All that the decorated versions of one function with the same options share."""

    def __init__(self, options: Options, fun: Callable[[], Callable]):
        """`fun` gives the function: held weakly, where this is cached on its account."""
        self._options, self._fun = options, fun
        self._body_of = tracer(options, fun)
        self._twins = placement.Twins()
        self._programs = Programs(
            options.choice.fun_name,
            _compat.JitOptions(static_argnums=options.static, donate_argnums=options.donated),
            trace=self._trace,
            miss=self._first_sight,
            without_jit=self._run_eagerly,
            around=self._around,
        )
        self._layouts: dict[int, Layout] = {}  # by size of the mapped axis, as last found
        self._processes: ProcessCalls | None = None
        self._is_chosen = False  # whether there are several processes
        self._donating: weakref.WeakSet[Body] = weakref.WeakSet()  # looked at
        self._programs.renew()

    @property
    def fun(self) -> Callable:
        """The mapped function, which `strict` names in its errors."""
        return self._fun()

    def serve(self, caller: Any) -> None:
        """Keeps `caller.__call__` the fastest way to call."""
        self._programs.serve(caller)

    @property
    def jitted(self) -> Callable:
        """The jit object, which moves no arguments."""
        used = self._programs.used
        call: Any = used.hiding(used.program.jitted)
        if used.placed is not None:  # a partial object, whose class declares no such names
            call.lower, call.trace = self.lower, self.trace
        return call

    def lower(self, /, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The program for these arguments; with several processes, that on whole arrays."""
        self._choose()
        if self._processes is not None:
            args, kwargs = self._processes.abstract(args, kwargs)
        call = self._bind(args, kwargs)
        found = self._find(call)
        if any_tracer(call.leaves):
            with self._programs.under_way(found):
                return self._programs.plain().jitted.lower(*args, **kwargs)
        described = [
            type_of(leaf, sharding=found.layout.sharding(axis, len(type_of(leaf).shape)))
            for leaf, axis in zip(call.leaves, call.axes, strict=True)
        ]
        args, kwargs = call.rebuild(described)
        bound = self._bound(found)
        lowered = self._programs.lower(bound, found, args, kwargs)
        _compat.describe_arguments(lowered, described)
        return bound.lowered(lowered)

    def trace(self, /, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """The jaxpr as a caller sees it, on the same arguments; captured arrays are in it."""
        self._choose()
        if self._processes is not None and self._options.arrays == "local":
            return self._processes.view.jitted.trace(*args, **kwargs)
        with self._programs.under_way(self._find(self._bind(args, kwargs))):
            return self._programs.plain().jitted.trace(*args, **kwargs)

    # ---- a call that the front does not know

    def _first_sight(self, program: Program, args: tuple, kwargs: dict) -> _compat.Answer:
        call = self._bind(args, kwargs)
        outside = meshes.Frame.around()
        if outside is not None:
            return self._stage_inside(call, outside), None, False
        if manual := meshes.manual_axes():
            raise refusal(
                NestingError,
                what=f"pmap of '{call.fun_name}' is called inside a shard_map or pmap that is not "
                "ours",
                which=[f"its manual axes are {manual!r}"],
                why="its mesh has no axis left for this pmap",
                do="Map the outer function with jax_dist.pmap too, or call jax.vmap inside.",
            )
        self._choose()
        if any_tracer(call.leaves) or programs.is_staged():  # the latter: a call on constants
            return self._stage(call, args, kwargs), None, False
        user = meshes.mesh_of_user()
        if user is None:
            return self._take(program, call, args, kwargs)
        get_mesh = getattr(jax.sharding, "get_mesh", None)
        mesh = None if get_mesh is None else get_mesh()  # 0.7 does not tell
        with meshes.no_mesh():
            results, memory, stale = self._take(program, call, args, kwargs)
        if mesh is None or not meshes.has_types(user):
            return results, memory, stale
        return meshes.laid_on(mesh, results), None, False

    def _take(self, program: Program, call: Call, args: tuple, kwargs: dict) -> _compat.Answer:
        """A call on arrays, outside of any trace and any mesh."""
        devices = self._options.choice.devices or ()
        placement.check_runs(devices[:1], f"pmap of '{call.fun_name}'")
        if self._processes is not None and self._processes.must_convert(call.leaves):
            return self._processes.call(*args, **kwargs), None, False

        layout = self._layouts.get(call.size)
        found = None
        if layout is None:
            found = self._find(call)
            layout = found.layout
        leaves, misplaced = self._on_mesh(call, layout)
        self._layouts[call.size] = layout
        if misplaced:
            args, kwargs = call.rebuild(leaves)
            return self._programs.front(*args, **kwargs), None, False
        return self._run(program, call, found or self._find(call), leaves)

    def _run(
        self, program: Program, call: Call, found: KnownSignature, leaves: Sequence[Any]
    ) -> _compat.Answer:
        """Runs the program for arguments that lie on the mesh of `found`, or nearly."""
        if found.layout is not self._layouts[call.size]:  # another body, with other pmaps inside
            self._layouts[call.size] = found.layout
            leaves, _ = self._on_mesh(call, found.layout)
        if self._options.donated and found.body not in self._donating:
            self._donating.add(found.body)
            _warn_of_unusable(self._options, call, found)
        self._programs.watch.warn_of(found.body.lifted.captures, lifted=True)
        if self._processes is not None:
            self._processes.agree(call, found.body, found.layout)
        args, kwargs = call.rebuild(leaves)
        return self._programs.run(
            self._bound(found), program, found, args, kwargs, found.layout.mesh
        )

    def _stage(self, call: Call, args: tuple, kwargs: dict) -> Any:
        """A call that is part of a trace outside."""
        plain = program = self._programs.plain()
        if self._processes is not None:
            program = self._processes.view
        found = self._find(call, whole=program is plain)
        try:
            return self._programs.stage(program, found.body.lifted, found, args, kwargs)
        except ValueError as error:
            if self._processes is None or "incompatible devices" not in text_of(error):
                raise
            raise refusal(
                PlacementError,
                what=f"pmap of '{call.fun_name}' got an array that only this process can see, "
                "while traced",
                which=["an argument is committed to devices of this process"],
                why="under grad, vmap or jit the whole program runs on the devices of all "
                "processes",
                do="Pass NumPy arrays there, or make global arrays first with jax_dist.shard.",
            ) from None

    def _stage_inside(self, call: Call, outside: meshes.Frame) -> Any:
        """A pmap in the body of another one: a region, for which a mesh is found later."""
        choice = self._options.choice
        if choice.devices is not None or choice.backend is not None:
            raise refusal(
                NestingError,
                what=f"pmap of '{choice.fun_name}' is called inside another mapped function",
                which=["it was given devices= or backend="],
                why="the outermost pmap chooses the devices of all of them",
                do="Give devices= to the outermost pmap only.",
            )
        if choice.axis_size not in (None, call.size):
            raise meshes.size_not_as_promised(choice.fun_name, choice.axis_size, call.size)
        body = self._body_of(call)
        axis = InnerAxis(outside.free_name(self._options.axis_name), call.size)
        wanted = axis._replace(size=1) if choice.virtual else axis
        outside.note(wanted, body.inner, body.regions)
        names, sizes = zip(axis, *body.inner, strict=True)
        mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
        place = AxisPlace(body.axis, call.size, axis.name, 1)
        values = body.lifted.values
        flat = region.run_body(body, values, call.leaves, call.axes, place, mesh, body.inner)
        return jax.tree.unflatten(body.out_tree, flat)

    # ---- what is traced

    def _trace(
        self, captured: Sequence[Any], args: tuple, kwargs: dict, *, as_view: bool = False
    ) -> Any:
        """What jit traces: the body on its mesh; `as_view`: on the slices of this process."""
        call = self._bind(args, kwargs)
        found = self._programs.found() or self._find(call, whole=not as_view)
        return emission.emitted(self._options, call, found, captured, as_view=as_view)

    def _run_eagerly(self, /, *args: Any, **kwargs: Any) -> Any:
        """Under `jax.disable_jit`: the user's function, once, on concrete slices."""
        call, options = self._bind(args, kwargs), self._options
        name = options.choice.axis_name if options.axis_name is None else options.axis_name
        layout = emission.layout_for(options, call, ())
        return region.run_eagerly(call, options.out_axes, name, layout)

    # ---- its parts

    def _bind(self, args: tuple, kwargs: dict) -> Call:
        return Call.bind(self._options, self._fun(), args, kwargs)

    def _find(self, call: Call, *, whole: bool = True) -> KnownSignature:
        return emission.KnownSignature.of(self._options, call, self._body_of, whole=whole)

    def _bound(self, found: KnownSignature) -> Bound:
        everywhere = NamedSharding(found.layout.mesh, P())
        place = lambda value: put_copy(value, everywhere)
        return self._programs.bound(found.body.lifted, found.layout.mesh, place)

    def _on_mesh(self, call: Call, layout: Layout) -> tuple[list[Any], bool]:
        """The leaves where the program wants them.

        Also whether one lay where a front must not think that it may lie: an array elsewhere.
        """
        leaves, misplaced = [], False
        for leaf, axis, owner in zip(call.leaves, call.axes, call.owners, strict=True):
            if placement.can_be_put(leaf):
                target = layout.sharding(axis, jnp.ndim(leaf))
                donated = owner in self._options.donated
                leaf, elsewhere = self._twins.put(leaf, target, donated=donated)
                misplaced = misplaced or elsewhere
            leaves.append(leaf)
        return leaves, misplaced

    def _around(self, call: Callable) -> Callable:
        """What a user's call goes to, around the front."""
        if self._processes is not None and self._options.arrays == "local":
            call = self._processes.call

        def explaining(*args: Any, **kwargs: Any) -> Any:
            try:  # a front compares static arguments before it asks Python about them
                return call(*args, **kwargs)
            except (TypeError, ValueError):
                check_static(self._options, self._fun(), args)
                raise

        return explaining if self._options.static else call

    def _choose(self) -> None:
        """Finds out whether several processes map together. Not before: it starts the backend."""
        if self._is_chosen:
            return
        self._is_chosen = True
        if len(set(map(meshes.owner_of, self._options.choice.candidates()))) <= 1:
            return
        from jax_dist._pmap.process_calls import ProcessCalls  # most programs need none

        view = self._programs.plain()
        if self._options.arrays == "local":
            view = Programs(
                self._programs.name,
                self._programs.options,
                trace=functools.partial(self._trace, as_view=True),
                miss=self._first_sight,
                without_jit=self._run_eagerly,
            ).plain()
        self._processes = ProcessCalls(
            self._options,
            self._fun,
            run=lambda *args, **kwargs: self._programs.front(*args, **kwargs),
            view=view,
            layout_of=lambda call: self._find(call).layout,
        )
        self._programs.renew()


def _warn_of_unusable(options: Options, call: Call, found: KnownSignature) -> None:
    """Warns of donated arguments whose memory no result can take over.

    JAX warns while it lowers, if it knows how the results lie; here XLA finds that out, and says
    nothing.
    """
    body, layout = found
    local = layout.size // layout.mesh.shape[layout.name]
    free, unusable = collections.Counter(), []
    for aval, axis in zip(body.jaxpr.out_avals, body.out_axes, strict=True):
        free[axes.stacked(aval.shape, axis, local), aval.dtype] += 1
    leaves = zip(call.paths(), call.leaves, call.axes, call.owners, strict=True)
    for path, leaf, axis, owner in leaves:
        if owner not in options.donated:
            continue
        kind = type_of(leaf)
        shape, dtype = axes.resized(kind.shape, axis, local), kind.dtype
        if free[shape, dtype]:
            free[shape, dtype] -= 1
        else:
            unusable.append(f"{path}: {dtype}[{','.join(map(str, shape))}]")
    if unusable:
        warn_user(
            message(
                what=f"Some donated buffers were not usable, in pmap of '{call.fun_name}'",
                which=unusable,
                why="no result that is left has this shape and type on a device",
                do="Leave these arguments out of donate_argnums; they keep their values.",
            ),
            UserWarning,
        )
