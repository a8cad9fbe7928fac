"""From `jax.pmap` to `jit(shard_map)`: the same numbers, right and fast, also across processes."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what editors and type checkers see
    from jax_dist._errors import CapturedArrayWarning as CapturedArrayWarning
    from jax_dist.mapping.placement import device_put_replicated as device_put_replicated
    from jax_dist.mapping.placement import device_put_sharded as device_put_sharded
    from jax_dist.mapping.placement import replicate as replicate
    from jax_dist.mapping.placement import shard as shard
    from jax_dist.mapping.placement import unreplicate as unreplicate
    from jax_dist.mapping.pmap import pmap as pmap
    from jax_dist.rewriting.api import explain as explain
    from jax_dist.rewriting.api import rewrite as rewrite

__version__ = "0.1.0"

_HOMES = {  # what Python sees: imported on first use, so that source tools never load jax
    "CapturedArrayWarning": "jax_dist._errors",
    "device_put_replicated": "jax_dist.mapping.placement",
    "device_put_sharded": "jax_dist.mapping.placement",
    "explain": "jax_dist.rewriting.api",
    "pmap": "jax_dist.mapping.pmap",
    "replicate": "jax_dist.mapping.placement",
    "rewrite": "jax_dist.rewriting.api",
    "shard": "jax_dist.mapping.placement",
    "unreplicate": "jax_dist.mapping.placement",
}
__all__ = (
    "CapturedArrayWarning",
    "__version__",
    "device_put_replicated",
    "device_put_sharded",
    "explain",
    "pmap",
    "replicate",
    "rewrite",
    "shard",
    "unreplicate",
)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
