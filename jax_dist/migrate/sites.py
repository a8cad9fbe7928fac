"""References to a function that maps like `jax.pmap`, whoever provides it.

Each target takes what the others wrote: `jax_dist.pmap`, and `mapped` of a vendored module.
"""

from collections.abc import Iterator

from jax_dist.lint.model import pmaps
from jax_dist.lint.model.pmaps import Site
from jax_dist.lint.model.semantic_model import Module
from jax_dist.migrate.places import Target
from jax_dist.migrate.verify.recording.calls import VENDORED


def names_of(module: Module, function: str, target: Target) -> tuple[str, ...]:
    """Return the dotted names, in jax, jax_dist or a vendored module, that `target` replaces.

    Args:
      module: the file.
      function: "pmap", "device_put_replicated" or "device_put_sharded".
      target: what they become; its own name for the function is not replaced.
    """
    names = [f"jax.{function}"] if function != "pmap" else [*pmaps.PMAP]
    if target != "jax_dist":
        names.append(f"jax_dist.{function}")
    if target != "vendored":
        names += _vendored_names(module, "mapped" if function == "pmap" else function)
    return tuple(dict.fromkeys(names))


def find(module: Module, target: Target) -> list[Site]:
    """Return every reference to a mapping function that `target` replaces, in order."""
    return pmaps.sites(module, names_of(module, "pmap", target))


def is_home(dotted: str) -> bool:
    """Return whether a dotted name is that of a vendored module."""
    return dotted.rpartition(".")[2] == VENDORED


def is_vendored(dotted: str) -> bool:
    """Return whether a dotted name is of a function of a vendored module."""
    return is_home(dotted.rpartition(".")[0])


def _vendored_names(module: Module, function: str) -> Iterator[str]:
    """Yield the names by which a file's imports of a vendored module mean its `function`."""
    all_bindings = (bindings for scope in module.scopes.all for bindings in scope.bindings.values())
    targets = (binding.target for bindings in all_bindings for binding in bindings)
    for target in filter(None, targets):  # of imports
        home, _, name = target.rpartition(".")
        if name == function and is_vendored(target):
            yield target
            yield module.absolute(target)
        elif is_home(target):
            yield f"{module.absolute(target)}.{function}"
