"""References to a function that maps like `jax.pmap`, whoever provides it.

Each target takes what the others wrote: `jax_dist.pmap`, and `mapped` of a vendored module.
"""

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
        vendored_function = "mapped" if function == "pmap" else function
        for name in module.used_names():
            home, _, last = name.rpartition(".")
            if is_vendored(name) and home != module.name and last == vendored_function:
                names.append(name)
    return tuple(names)


def find(module: Module, target: Target) -> list[Site]:
    """Return every reference to a mapping function that `target` replaces, in order."""
    return pmaps.sites(module, names_of(module, "pmap", target))


def is_vendored(dotted: str) -> bool:
    """Return whether a dotted name is of a function of a vendored module: `pkg._mapped.mapped`."""
    return dotted.split(".")[-2:-1] == [VENDORED]
