"""The key under which JAX looks for a program in its persistent cache, part by part.

The key is one hash over eight components. A program is found again if all eight are the same.
"""

import dataclasses
from typing import TypeAlias

import jax

from jax_dist import _compat

COMPONENTS = (  # in JAX's words and order
    "computation",
    "jax_lib version",
    "backend version",
    "XLA flags",
    "compile_options",
    "accelerator_config",
    "compression",
    "custom_hook",
)

Hashes: TypeAlias = dict[str, str]  # component to hash, in hexadecimal


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """The key of one program, and the hash of each of its components."""

    function: str  # such as "jit_step"
    name: str  # "jit_step-" and the hash of all; the entry's file has "-cache" behind it
    components: Hashes

    def differing(self, other: "Key") -> tuple[str, ...]:
        """The components that are not the same in both keys."""
        return differing(self.components, other.components)

    def to_dict(self) -> dict[str, object]:
        """For machines."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        width = max(map(len, self.components))
        lines = (f"  {name:{width}}  {hash_[:16]}" for name, hash_ in self.components.items())
        return "\n".join((self.name, *lines))


def key(lowered: jax.stages.Lowered) -> Key:
    """The key under which JAX will look for a lowered program; compiles nothing.

    Through jax 0.10.2 the cache's directory is part of it: set that first.

    Args:
      lowered: what `jax.jit(fun).lower(*args)` returns.

    Returns:
      The key, equal to the name of the file that JAX writes, and the hash of each component.

    Raises:
      UnsupportedError: this jax does not expose the components of its keys.

    >>> import jax, jax.numpy as jnp
    >>> def double(x):
    ...     return 2 * x
    >>> found = key(jax.jit(double).lower(jnp.ones(3)))
    >>> found.function
    'jit_double'
    >>> key(jax.jit(double).lower(jnp.ones(4))).differing(found)
    ('computation',)
    """
    return key_of(_compat.compile_request(lowered))


def key_of(request: _compat.CompileRequest) -> Key:
    """The key of a program that JAX is about to compile."""
    name, hashes = _compat.cache_key(request)
    return Key(request.name, name, hashes)


def differing(one: Hashes, other: Hashes) -> tuple[str, ...]:
    """The components whose hashes differ, those that JAX names first."""
    names = dict.fromkeys((*COMPONENTS, *one, *other))
    return tuple(name for name in names if one.get(name) != other.get(name))
