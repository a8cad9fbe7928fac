"""The private parts of JAX, by name: every one is looked up here, and may be gone tomorrow."""

import importlib
from typing import Any

import jax

from jax_dist.errors import UnsupportedError, message


def find(module: str, name: str) -> Any | None:
    """The part of this name; None where this jax has none.

    Args:
      module: such as "jax._src.compiler".
      name: of an attribute in it, or of one of that: "config_ext.Config".
    """
    try:
        found: Any = importlib.import_module(module)
        for step in name.split("."):
            found = getattr(found, step)
    except (ImportError, AttributeError):
        return None
    return found


def part(module: str, name: str, *, use: str) -> Any:
    """The part of this name.

    Args:
      module: see `find`.
      name: the same.
      use: what cannot be done without it, as in "see the calls of jit objects".

    Raises:
      UnsupportedError: this jax has none.
    """
    found = find(module, name)
    if found is None:
        raise UnsupportedError(
            message(
                what=f"jax_dist cannot {use} with jax {jax.__version__}",
                which=[f"{module}.{name} is not there"],
                why="JAX has no public way to it, and its private parts change",
                do="Use a jax that jax_dist was tested with, or go without; see docs/versions.md.",
            )
        )
    return found
