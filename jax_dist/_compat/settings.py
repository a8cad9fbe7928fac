"""The settings of JAX, by name."""

from typing import Any

import jax


def config_value(name: str) -> Any:
    """A setting of JAX, by its name; type checkers know none of them."""
    return getattr(jax.config, name)


def option_names() -> list[str]:
    """The names of JAX's settings, such as "jax_enable_x64".

    `jax.config` is public, and its `values` are in no documentation; the same in 0.7.2, 0.10.2 and
    0.12.0.1.
    """
    return sorted(jax.config.values)
