"""What the user is told of donation."""

import collections

import jax
from jax.core import ShapedArray

from jax_dist.errors import message
from jax_dist.mapping.axes import Axis
from jax_dist.mapping.body import type_of
from jax_dist.mapping.calls import Call, Options
from jax_dist.mapping.emission import KnownSignature
from jax_dist.passes.findings import warn_user


def warn_of_unusable(options: Options, call: Call, found: KnownSignature) -> None:
    """Warns of donated arguments whose memory no result can take over.

    JAX warns while it lowers, if it knows how the results lie; here XLA finds that out, and says
    nothing.
    """
    if not options.donated:
        return
    body, layout = found
    local = layout.size // layout.mesh.shape[layout.name]
    outs = zip(body.jaxpr.out_avals, body.out_axes, strict=True)
    free = collections.Counter(_block(aval, axis, local) for aval, axis in outs)
    unusable = []
    leaves = zip(call.paths(), call.leaves, call.axes, call.owners, strict=True)
    for path, leaf, axis, owner in leaves:
        kind = type_of(leaf)
        block = _block_of_whole(kind, axis, local)
        if owner in options.donated and not free[block]:
            unusable.append(f"{path}: {kind.dtype}[{','.join(map(str, block[0]))}]")
        elif owner in options.donated:
            free[block] -= 1
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


def _block(slice_type: ShapedArray, axis: Axis, local: int) -> tuple:
    shape = list(slice_type.shape)
    if axis is not None:
        shape.insert(axis, local)
    return tuple(shape), slice_type.dtype


def _block_of_whole(whole: jax.ShapeDtypeStruct, axis: Axis, local: int) -> tuple:
    shape = list(whole.shape)
    if axis is not None:
        shape[axis] = local
    return tuple(shape), whole.dtype
