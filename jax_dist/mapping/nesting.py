"""pmaps inside pmaps: one mesh for all, found while tracing.

The outermost pmap is traced on a mesh with its own axis only. Where its body calls another pmap,
that one asks for an axis by raising `MoreAxes`; the outermost adds it to the mesh and traces again.
Each depth has one mesh axis. A second pmap at the same depth that wants another name or size, or a
name that is taken, cannot have its own, and runs as a vmap whose blocks lie along that axis.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator

import jax
from jax import lax

from jax_dist.mapping.meshes import InnerAxis


class MoreAxes(BaseException):
    """A pmap inside needs a mesh axis. No Exception, so that user code does not catch it."""

    def __init__(self, axis: InnerAxis):
        super().__init__(axis)
        self.axis = axis


@dataclasses.dataclass(frozen=True)
class Frame:
    """What a body that is being traced knows of the mesh around it."""

    names: tuple[object, ...]  # the axes that collectives in the body can name, outermost first
    inner: tuple[InnerAxis, ...]  # the mesh axes kept for the pmaps inside, outermost first
    depth: int  # how many of `inner` are taken by now
    manual: bool  # False inside a vmap: the pmaps inside are vmaps too
    grows: bool  # whether the mesh can get an axis for each depth


class _Frames(threading.local):
    def __init__(self):
        self.stack: list[Frame] = []


_frames = _Frames()


@contextlib.contextmanager
def entered(frame: Frame) -> Iterator[None]:
    """Everything traced inside belongs to `frame`."""
    _frames.stack.append(frame)
    try:
        yield
    finally:
        _frames.stack.pop()


def current() -> Frame | None:
    """The frame of the pmap whose body is being traced; None outside."""
    return _frames.stack[-1] if _frames.stack else None


def is_bound(name: object) -> bool:
    """Whether collectives can name this axis here already, say that of a vmap outside.

    JAX would then batch a psum over the mesh axis of that name as if it were over the vmap's.
    """
    try:
        lax.axis_size(name)
    except NameError:
        return False
    return True


def manual_axes() -> tuple[object, ...]:
    """The axes of the shard_map that is being traced, ours or not; empty outside."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = jax.sharding.AxisType.Manual
    return tuple(
        name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == manual
    )
