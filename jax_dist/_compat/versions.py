"""What a version of JAX can do, and its settings, by name.

A version is compared only where there is no name to ask for.
"""

from typing import Any

import jax

NESTED_MANUAL_AXIS_INDEX = jax.__version_info__ >= (0, 8)
"""Whether `axis_index` lowers inside a shard_map that is nested in another one.

On 0.7.2 it fails with "operates on axis 'i' which is already bound by a parent"; seen to work on
0.10.2 and 0.12.0.1. Not a name to ask for, so the version is compared.
"""


CPU_HANGS_WHEN_FULL = jax.__version_info__ < (0, 12)
"""Whether the CPU backend hangs over more than 32 executions on several devices in flight.

With 8 devices, 400 calls of a psum hang on 0.10.2 and abort on 0.7.2; on 0.12.0.1 they do not. No
version in between was tried.
"""


CACHES_HOST_CALLBACKS = jax.__version_info__ >= (0, 12)
"""Whether a program with a host callback is written to the persistent cache.

Compiled again in every process on 0.10.2; written, and found again, on 0.12.0.1. Not a name to ask
for, so the version is compared.
"""


PROCESSES_KEEP_WEAK_TYPES = jax.__version_info__ < (0, 8)
"""Whether arrays that `jax.pmap` takes and gives in several processes keep weak types.

They do on 0.7.2, and do not on 0.8.0, 0.10.2 and 0.12.0.1. In one process they always do.
"""


CAN_REWRITE = jax.__version_info__ >= (0, 10)
"""Whether jaxprs are such as the passes know them: jit of shard_map, typed by `manual_axis_type`.

Before 0.8 a pmap is a primitive of its own; before 0.10 the types are named otherwise.
"""


def config_value(name: str) -> Any:
    """A setting of JAX, by its name; type checkers know none of them."""
    return getattr(jax.config, name)


def option_names() -> list[str]:
    """The names of JAX's settings, such as "jax_enable_x64".

    `jax.config` is public, and its `values` are in no documentation; the same in 0.7.2, 0.10.2 and
    0.12.0.1.
    """
    return sorted(jax.config.values)
