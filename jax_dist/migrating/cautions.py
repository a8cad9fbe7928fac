"""What a reader of a migration has to know about it, besides its places."""

import os
from collections.abc import Iterator, Sequence

from jax_dist.checker.engine import requirement
from jax_dist.migrating.context import Context
from jax_dist.migrating.files import Options
from jax_dist.migrating.outcomes import FileMigration

_PMAP = "JXD001"
_NEEDS = (0, 8)
_BUILD_FILES = ("BUILD", "BUILD.bazel")


def of(files: Sequence[FileMigration], context: Context, options: Options) -> Iterator[str]:
    """The cautions of one migration, a sentence each.

    Args:
      files: what became of them.
      context: their projects.
      options: what was asked for.
    """
    places = [outcome for file in files for outcome in file.outcomes if outcome.status == "done"]
    if options.to != "jax" or not any(outcome.code == _PMAP for outcome in places):
        return
    fake = context.fake()
    if fake is not None:
        yield (
            f"{fake} has jax.pmap replaced while it runs: mapped is not replaced there. In tests, "
            "give it as many devices as slices."
        )
    if context.sign is not None and not options.promises.one_process:
        yield (
            f"The program may run in several processes ({context.sign}). There, mapped keeps the "
            "view of jax.pmap; inside jit, grad or vmap it raises an error, where jax.pmap "
            "silently uses the devices of one process only."
        )
    asked = [each for each in map(requirement.lower_bound, context.graph.roots) if each is not None]
    if asked and min(asked) < _NEEDS:
        oldest = ".".join(map(str, min(asked)))
        yield f"What was written needs jax 0.8 or newer; the project asks for {oldest} or newer."
    for file in files:
        for name in _BUILD_FILES if file.is_new else ():
            build = os.path.join(os.path.dirname(file.path), name)
            if os.path.isfile(build):
                yield f"Add {os.path.basename(file.path)} to the sources in {build}."
