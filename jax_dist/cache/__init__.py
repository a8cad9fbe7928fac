"""JAX's persistent compilation cache: one that hits, says why it did not, and repairs itself.

In come a folder and, by the places that `_compat` opens in JAX, each program that JAX looks up,
compiles and writes. Out come the entries of the folder, counts, and causes by name. `activation`
switches the cache on and counts; `store` and `entries` are its files. `verification` runs a program
several times, each written down by `recorder` as `records`; `explanation` finds the `causes` in two
programs of one name.

A program never ends because its cache is ill. No file has its final name before it is whole, bytes
that differ from those that were written never reach XLA, and nothing is loaded from a folder that
others can change.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what editors and type checkers see
    from jax_dist.cache.activation import enable as enable
    from jax_dist.cache.activation import stats as stats

_HOMES = {  # what Python sees: imported on first use, so that listing a directory never loads jax
    "enable": "jax_dist.cache.activation",
    "stats": "jax_dist.cache.activation",
}
__all__ = ("enable", "stats")


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
