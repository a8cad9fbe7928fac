"""Move JAX code from `jax.pmap` to `jit(shard_map)`: the same numbers, on one machine or many."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what editors and type checkers see
    from jax_dist import cache as cache
    from jax_dist import errors as errors
    from jax_dist import multihost as multihost
    from jax_dist.consistency.api import check as check
    from jax_dist.consistency.api import compare_device_counts as compare_device_counts
    from jax_dist.errors import CapturedArrayWarning as CapturedArrayWarning
    from jax_dist.errors import DonationError as DonationError
    from jax_dist.errors import MemoryGrowthError as MemoryGrowthError
    from jax_dist.errors import RecompileError as RecompileError
    from jax_dist.errors import TransferError as TransferError
    from jax_dist.global_views.view import global_view as global_view
    from jax_dist.guards.memory import memory_guard as memory_guard
    from jax_dist.guards.strict import allow_recompiles as allow_recompiles
    from jax_dist.guards.strict import allow_transfers as allow_transfers
    from jax_dist.guards.strict import strict as strict
    from jax_dist.machines.topologies import topology as topology
    from jax_dist.mapping.filter_pmap import filter_pmap as filter_pmap
    from jax_dist.mapping.nnx_pmap import nnx_pmap as nnx_pmap
    from jax_dist.mapping.placement import device_put_replicated as device_put_replicated
    from jax_dist.mapping.placement import device_put_sharded as device_put_sharded
    from jax_dist.mapping.placement import replicate as replicate
    from jax_dist.mapping.placement import shard as shard
    from jax_dist.mapping.placement import unreplicate as unreplicate
    from jax_dist.mapping.pmap import pmap as pmap
    from jax_dist.rewriting.api import explain as explain
    from jax_dist.rewriting.api import rewrite as rewrite

__version__ = "0.1.0"

_NAMES = {  # what Python sees: imported on first use, so that source tools never load jax
    "cache": "cache",
    "consistency.api": "check compare_device_counts",
    "errors": "errors CapturedArrayWarning DonationError MemoryGrowthError RecompileError "
    "TransferError",
    "global_views.view": "global_view",
    "guards.memory": "memory_guard",
    "guards.strict": "allow_recompiles allow_transfers strict",
    "machines.topologies": "topology",
    "mapping.filter_pmap": "filter_pmap",
    "mapping.nnx_pmap": "nnx_pmap",
    "mapping.placement": "device_put_replicated device_put_sharded replicate shard unreplicate",
    "mapping.pmap": "pmap",
    "multihost": "multihost",
    "rewriting.api": "explain rewrite",
}
_HOMES = {name: f"jax_dist.{home}" for home, names in _NAMES.items() for name in names.split()}
__all__ = (
    "CapturedArrayWarning",
    "DonationError",
    "MemoryGrowthError",
    "RecompileError",
    "TransferError",
    "__version__",
    "allow_recompiles",
    "allow_transfers",
    "cache",
    "compare_device_counts",
    "device_put_replicated",
    "device_put_sharded",
    "errors",
    "explain",
    "global_view",
    "filter_pmap",
    "memory_guard",
    "multihost",
    "nnx_pmap",
    "pmap",
    "replicate",
    "rewrite",
    "shard",
    "strict",
    "topology",
    "unreplicate",
)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(_HOMES[name])
    value = globals()[name] = home if home.__name__ == f"{__name__}.{name}" else getattr(home, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
