"""JAX's persistent compilation cache: one that hits, says why it did not, and repairs itself."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what editors and type checkers see
    from jax_dist.cache import failures as failures
    from jax_dist.cache.doctor import doctor as doctor
    from jax_dist.cache.enabling import enable as enable
    from jax_dist.cache.stats import stats as stats
    from jax_dist.cache.warming import warm as warm

_HOMES = {  # what Python sees: imported on first use, so that listing a directory never loads jax
    "doctor": "jax_dist.cache.doctor",
    "enable": "jax_dist.cache.enabling",
    "stats": "jax_dist.cache.stats",
    "warm": "jax_dist.cache.warming",
}
__all__ = ("doctor", "enable", "failures", "stats", "warm")


def __getattr__(name: str) -> object:
    if name == "failures":
        return import_module("jax_dist.cache.failures")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
