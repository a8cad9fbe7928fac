"""Trace of the function of one slice, without a map."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, AxisType

from jax_dist._pmap import axes, meshes
from jax_dist._pmap.axes import Axis
from jax_dist._pmap.body import Call
from jax_dist._pmap.meshes import InnerAxis
from jax_dist._pmap.options import Options
from jax_dist._rewrite import captures
from jax_dist._rewrite.captures import Lifted


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TracedFunction:
    """The jaxpr of the function of one slice.

    Its inputs are the captured arrays that are lifted, then a slice `[*s]` of each argument leaf.
    """

    lifted: Lifted
    out_tree: Any
    out_axes: tuple[Axis, ...]
    inner: tuple[InnerAxis, ...]  # the axes of pmaps inside

    @property
    def jaxpr(self) -> ClosedJaxpr:
        return self.lifted.jaxpr

    @classmethod
    def of(
        cls, options: Options, call: Call, model_axes: Sequence[tuple[Any, int]]
    ) -> "TracedFunction":
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
        mapped = (options.axis_name, call.size)
        trace = functools.partial(jax.make_jaxpr(body, axis_env=[mapped]), *call.slices())
        with captures.tracing(options.captures):
            jaxpr = _trace_on_mesh_if_needed(trace, mapped, model_axes)
        lifted = captures.lift(jaxpr, call.fun, options.fun_name, options.captures)
        return cls(lifted, *outputs[-1], tuple(frame.wanted))


def _trace_on_mesh_if_needed(
    trace: Callable[[], ClosedJaxpr], mapped: tuple[Any, int], model_axes: Sequence[tuple[Any, int]]
) -> ClosedJaxpr:
    """Trace without a mesh; or on one, if the body names axes of its mesh, as `pcast` does."""
    try:
        return trace()
    except (AssertionError, RuntimeError) as error:
        signs = ("ManualAxisType", "requires a non-empty mesh in context")
        if not any(sign in str(error) for sign in signs):
            raise
    names, sizes = zip(mapped, *model_axes, strict=True)
    kinds = (AxisType.Manual, *[AxisType.Auto for _ in model_axes])
    with meshes.context_of(AbstractMesh(sizes, names, axis_types=kinds)):
        return trace()
