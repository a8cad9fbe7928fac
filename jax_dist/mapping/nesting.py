"""What a body that is being traced knows of the maps around it.

A body is traced with its axes in the environment and no mesh. A pmap that it calls becomes a
shard_map over an abstract mesh of one axis, and notes here which axis it wants. The mesh of all of
them is chosen when the trace of the outermost body is complete (see `region`).
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator

import jax
from jax import lax

from jax_dist.mapping.meshes import UNNAMED, InnerAxis

_MADE_UP = UNNAMED.removesuffix("0")


@dataclasses.dataclass(slots=True)
class Frame:
    """One body that is being traced."""

    names: tuple[object, ...]  # the axes that collectives in the body can name, outermost first
    inner: list[InnerAxis] = dataclasses.field(default_factory=list)  # of pmaps inside, by depth
    regions: set[str] = dataclasses.field(default_factory=set)  # names of their abstract axes

    def note(self, axis: InnerAxis, below: tuple[InnerAxis, ...], regions: frozenset[str]) -> None:
        """A pmap inside wants this axis, and the pmaps in it want those `below`.

        Each depth has one mesh axis: that of the first pmap there.
        """
        wanted = (axis, *below)
        self.inner += wanted[len(self.inner) :]
        self.regions |= {axis.name, *regions}

    def free_name(self, name: object) -> str:
        """For the abstract axis of a pmap inside: its own if no axis around has that name."""
        if isinstance(name, str) and name not in self.names:
            return name
        return f"{_MADE_UP}{len(self.names)}"


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


def is_made_up(name: object) -> bool:
    """Whether a mapped axis has this name because the user gave none."""
    return isinstance(name, str) and name.startswith(_MADE_UP)


def is_bound(name: object) -> bool:
    """Whether collectives can name this axis here already, say that of a vmap outside."""
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
