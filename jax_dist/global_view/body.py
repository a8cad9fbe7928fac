"""The function of one slice as a jaxpr, which `global_view` evaluates without a map."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, AxisType

from jax_dist._pmap import axes, meshes
from jax_dist._pmap.axes import Axis
from jax_dist._pmap.body import Call, type_of
from jax_dist._pmap.meshes import InnerAxis
from jax_dist._pmap.options import Options
from jax_dist._rewrite import captures
from jax_dist._rewrite.captures import Lifted


@dataclasses.dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Body:
    """The jaxpr of the function of one slice.

    Its inputs are the captured arrays that are lifted, then a slice `[*s]` of each argument leaf.
    """

    axis: Any  # the name of the mapped axis in it
    lifted: Lifted
    out_tree: Any
    out_axes: tuple[Axis, ...]
    inner: tuple[InnerAxis, ...]  # the axes of pmaps inside

    @property
    def jaxpr(self) -> ClosedJaxpr:
        return self.lifted.jaxpr

    @classmethod
    def of(cls, options: Options, call: Call) -> "Body":
        """Trace the function on slices of global arguments that have types."""
        frame = meshes.Frame((options.axis_name,))
        outputs: list[tuple[Any, tuple[Axis, ...]]] = []

        def body(*slices: jax.Array) -> list[Any]:
            with frame.active():
                output = call.run(slices)
            leaves, structure = jax.tree.flatten(output)
            out_axes = axes.spread_out_axes(options.out_axes, output, options.fun_name)
            outputs.append((structure, out_axes))
            return leaves

        body.__name__ = body.__qualname__ = options.fun_name
        body.__wrapped__ = call.fun  # pyright: ignore[reportFunctionMemberAccess]  # JAX names its line
        environment = [(options.axis_name, call.size)]
        types = []
        for leaf, axis in zip(call.leaves, call.axes, strict=True):
            shape = list(type_of(leaf).shape)
            if axis is not None:
                del shape[axis]
            types.append(type_of(leaf, shape))
        trace = functools.partial(jax.make_jaxpr(body, axis_env=environment), *types)
        with captures.tracing(options.captures):
            jaxpr = _trace_on_mesh_if_needed(trace, options, call)
        structure, out_axes = outputs[-1]
        lifted = captures.lift(jaxpr, call.fun, options.fun_name, options.captures)
        return cls(options.axis_name, lifted, structure, out_axes, tuple(frame.wanted))


def _trace_on_mesh_if_needed(
    trace: Callable[[], ClosedJaxpr], options: Options, call: Call
) -> ClosedJaxpr:
    """Trace a body without a mesh; or on one, if it says something of its mesh, as `pcast` does."""
    try:
        return trace()
    except (AssertionError, RuntimeError) as error:
        signs = ("ManualAxisType", "requires a non-empty mesh in context")
        if not any(sign in str(error) for sign in signs):
            raise
    mesh = options.lay_out(call.size, whole=True).mesh.abstract_mesh
    mesh = mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Manual))
    if options.other_axes:
        axis_types = (*mesh.axis_types, *(AxisType.Auto for _ in options.other_axes))
        names, sizes = zip(*mesh.shape_tuple, *options.other_axes, strict=True)
        mesh = AbstractMesh(sizes, names, axis_types=axis_types)
    with meshes.context_of(mesh):
        return trace()
