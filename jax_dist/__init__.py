"""Move JAX code from `jax.pmap` to `jit(shard_map)`: the same numbers, on one machine or many."""

import sys
from importlib import import_module
from types import ModuleType

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
__all__ = ("__version__", *_MODULES, *_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


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
