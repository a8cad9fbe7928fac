"""Move JAX code from `jax.pmap` to `jit(shard_map)`: the same numbers, on one machine or many."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what editors and type checkers see
    from jax_dist import cache as cache
    from jax_dist import errors as errors
    from jax_dist import multihost as multihost
    from jax_dist import testing as testing
    from jax_dist._pmap.placement import device_put_replicated as device_put_replicated
    from jax_dist._pmap.placement import device_put_sharded as device_put_sharded
    from jax_dist._pmap.placement import replicate as replicate
    from jax_dist._pmap.placement import shard as shard
    from jax_dist._pmap.placement import unreplicate as unreplicate
    from jax_dist.errors import CapturedArrayWarning as CapturedArrayWarning
    from jax_dist.errors import DonationError as DonationError
    from jax_dist.errors import MemoryGrowthError as MemoryGrowthError
    from jax_dist.errors import RecompileError as RecompileError
    from jax_dist.errors import TransferError as TransferError
    from jax_dist.filter_pmap import filter_pmap as filter_pmap
    from jax_dist.global_view.view import global_view as global_view
    from jax_dist.memory import memory_guard as memory_guard
    from jax_dist.nnx_pmap import nnx_pmap as nnx_pmap
    from jax_dist.plan import plan as plan
    from jax_dist.pmap import pmap as pmap
    from jax_dist.rewrite import explain as explain
    from jax_dist.rewrite import rewrite as rewrite
    from jax_dist.strict import allow_recompiles as allow_recompiles
    from jax_dist.strict import allow_transfers as allow_transfers
    from jax_dist.strict import strict as strict
    from jax_dist.topology import topology as topology

__version__ = "0.1.0"

_MODULES = ("cache", "errors", "multihost", "testing")
_NAMES = {  # by module, imported on first use, so that lint and migrate never load jax
    "_pmap.placement": "device_put_replicated device_put_sharded replicate shard unreplicate",
    "errors": "CapturedArrayWarning DonationError MemoryGrowthError RecompileError TransferError",
    "filter_pmap": "filter_pmap",
    "global_view.view": "global_view",
    "memory": "memory_guard",
    "nnx_pmap": "nnx_pmap",
    "plan": "plan",
    "pmap": "pmap",
    "rewrite": "explain rewrite",
    "strict": "allow_recompiles allow_transfers strict",
    "topology": "topology",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = ("__version__", *_MODULES, *_HOMES)


class _Package(ModuleType):
    """The package, in which a function wins over the file of the same name.

    The import system binds `jax_dist/pmap.py` to the name `pmap`; users expect the function.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, ModuleType) and name in _HOMES:
            value = __getattr__(name)
        super().__setattr__(name, value)


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.modules[__name__].__class__ = _Package
