"""What a compiled program depends on in its arguments, in words: type, placement, static value."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, SingleDeviceSharding

from jax_dist import _compat

_STRENGTH = {True: "a weak type, as Python numbers do", False: "a strong type, as arrays do"}


@dataclasses.dataclass(frozen=True, slots=True)
class ArgumentType:
    """Of one leaf of the arguments; None where it is not known."""

    shape: tuple[int, ...]
    dtype: str
    weak: bool  # as Python numbers are: it takes the type of what it meets
    placement: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Signature:
    """Of one call."""

    types: Mapping[str, ArgumentType]  # by the path of the argument
    statics: Mapping[str, str]  # by the name of the argument: its repr

    def renamed(self, shown: Mapping[str, str]) -> "Signature":
        """With other words for the paths."""
        types = {shown.get(path, path): type_ for path, type_ in self.types.items()}
        return Signature(types, self.statics)

    def changes_from(self, before: "Signature") -> list["Change"]:
        """What differs, in the order of the arguments."""
        return list(_changes(self, before))


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    kind: str  # a key of the remedies: "shape", "dtype", "weak", "placement", "static", "tree"
    text: str  # as a bullet of a message


def signature_of(call: _compat.JitCall) -> Signature:
    """What the program of this call is looked up by."""
    types = {path: type_of(leaf) for path, leaf in zip(call.paths, call.leaves, strict=False)}
    return Signature(types, {name: repr(value) for name, value in call.statics.items()})


def type_of(value: Any) -> ArgumentType:
    aval = jax.typeof(value)
    placement = placement_of(value) if isinstance(value, jax.Array) else None
    weak = bool(getattr(aval, "weak_type", False))
    return ArgumentType(tuple(aval.shape), str(aval.dtype), weak, placement)


def placement_of(array: jax.Array) -> str:
    """Where an array lies, in words that are the same on every jax.

    >>> import jax.numpy as jnp
    >>> placement_of(jnp.zeros(3))
    'device 0, uncommitted'
    >>> placement_of(jax.device_put(jnp.zeros(3), jax.devices()[1]))
    'device 1'
    """
    sharding = array.sharding
    if isinstance(sharding, NamedSharding):
        axes = ", ".join(f"{name}={size}" for name, size in sharding.mesh.shape.items())
        spec = ", ".join(repr(part) for part in sharding.spec)
        return f"P({spec}) over {axes}"
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = sharding.device_set
        return f"device {device.id}" + ("" if array.committed else ", uncommitted")
    return f"{type(sharding).__name__} over {len(sharding.device_set)} devices"


def devices_of(array: jax.Array) -> str:
    """Where an array lies, whether it is committed to that or not."""
    return placement_of(array).removesuffix(", uncommitted")


def text_of(value: Any) -> str:
    """Such as "float32[8,4]".

    >>> import numpy as np
    >>> text_of(np.ones((8, 4), np.float32)), text_of(1.5)
    ('float32[8,4]', 'float32[]')
    """
    kind = jax.typeof(value)
    return f"{kind.dtype}[{','.join(map(str, kind.shape))}]"


def _changes(now: Signature, before: Signature) -> Iterator[Change]:
    for path, type_ in now.types.items():
        if path in before.types:
            yield from _changes_of_type(path, type_, before.types[path])
        else:
            yield Change("tree", f"{path} is new")
    for path in before.types:
        if path not in now.types:
            yield Change("tree", f"{path} is gone")
    for name, value in now.statics.items():
        was = before.statics.get(name)
        if was is not None and was != value:
            yield Change("static", f"{name} is the static value {value}, before {was}")


def _changes_of_type(path: str, now: ArgumentType, was: ArgumentType) -> Iterator[Change]:
    if now.shape != was.shape:
        yield Change("shape", f"{path} has the shape {now.shape}, before {was.shape}")
    if now.dtype != was.dtype:
        yield Change("dtype", f"{path} has the type {now.dtype}, before {was.dtype}")
    if now.weak != was.weak:
        yield Change("weak", f"{path} has {_STRENGTH[now.weak]}, before {_STRENGTH[was.weak]}")
    if now.placement != was.placement and None not in (now.placement, was.placement):
        yield Change("placement", f"{path} lies on {now.placement}, before on {was.placement}")
