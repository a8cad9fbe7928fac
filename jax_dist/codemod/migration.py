"""Files that are migrated together, the helper modules that they need, and what to know of them."""

import collections
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from jax_dist import _codes
from jax_dist.checker.engine import config, linter
from jax_dist.checker.engine.linter import load
from jax_dist.checker.model import sources
from jax_dist.checker.model.findings import indentation_of
from jax_dist.checker.model.sources import UnreadableError
from jax_dist.codemod import files, helper_module, pmap_renames
from jax_dist.codemod.context import ProjectContext
from jax_dist.codemod.files import MigrationOptions
from jax_dist.codemod.results import FileMigration, Left

Progress: TypeAlias = Callable[[int, int], None]  # files done, files in all

# A file that holds none of these has no place to migrate, except for renamed functions.
_WORDS = (b"pmap", b"replicate", b"device_put_")


def migrate(
    paths: Sequence[str],
    options: MigrationOptions,
    *,
    helpers: str = "",
    progress: Progress = lambda done, total: None,
) -> tuple[list[FileMigration], ProjectContext]:
    """Migrates files together; nothing is written.

    Args:
      paths: the files. A name that one of them defines and another uses is migrated in both.
      options: what is asked for.
      helpers: the path of the module for all helpers; "" where each package has its own.
      progress: is told how far it is.

    Returns:
      The files with something to migrate, and those that could not be read, in the order given;
      then the helper modules. And the projects, for what a report says of them.
    """
    context = ProjectContext.of(paths, helpers)
    held: dict[str, bytes] = {}
    found: dict[str, FileMigration] = {}
    for path in paths:
        try:
            with open(path, "rb") as file:
                data = file.read()
        except OSError as error:
            problem = f"it cannot be read: {error.strerror or error}"
            found[path] = FileMigration(path, b"", b"", problem=problem)
        else:
            if _wanted(data):
                held[path] = data
    done = len(paths) - len(held)
    # Files outside of a package may import the module that those within it have asked for.
    inside = {path for path in held if context.homes.is_in_package(path)}
    for path in sorted(held, key=lambda path: path not in inside):
        migrated = of_text(path, held[path], context, options)
        if migrated is not None:
            found[path] = migrated
            if migrated.helpers is not None and path in inside:
                context.homes.migrated.add(migrated.helpers.path)
        done += 1
        progress(done, len(paths))
    return _with_modules([found[path] for path in paths if path in found]), context


def of_text(
    path: str, data: bytes, context: ProjectContext, options: MigrationOptions
) -> FileMigration | None:
    """One file; None where there is nothing to do in it, and nothing to say of it.

    It need not be `_wanted`. A fault of ours stays in its file: that is left whole, and says so.
    """
    try:
        found = files.migrate(load(path, data), context, options)
    except UnreadableError as error:
        return FileMigration(path, data, data, problem=str(error))
    except Exception as error:  # noqa: BLE001 - other files must not suffer
        problem = f"jax-dist failed on it ({type(error).__name__}: {error}); please report this"
        return FileMigration(path, data, data, problem=problem)
    return found if found.outcomes or found.problem or found.changed else None


def _wanted(data: bytes) -> bool:
    """Whether a file may have something to migrate, by its bytes; False is certain."""
    if any(sources.holds(word, data) for word in _WORDS):
        return True
    return linter.wanted(data, pmap_renames.CODES)


# --- helper modules


def _with_modules(found: list[FileMigration]) -> list[FileMigration]:
    """The files and their helper modules: new ones, and those that get more than they have.

    Files whose module cannot have what they need are left.
    """
    users: dict[str, list[int]] = {}
    for position, migrated in enumerate(found):
        if migrated.helpers is not None:
            users.setdefault(migrated.helpers.path, []).append(position)
    modules: list[FileMigration] = []
    for path, positions in sorted(users.items()):
        names = frozenset[str]().union(*(_helpers(found[each]) for each in positions))
        first = found[positions[0]].after.decode("utf-8", "replace")
        try:
            modules.append(_module(path, names, indentation_of(first)))
        except Left as left:
            for each in positions:
                found[each] = found[each].left_whole(left)
    return [*found, *modules]


def _helpers(migrated: FileMigration) -> frozenset[str]:
    return frozenset() if migrated.helpers is None else migrated.helpers.names


def _module(path: str, names: frozenset[str], unit: str) -> FileMigration:
    """Raises Left."""
    shown = os.path.relpath(path)
    try:
        with open(path, encoding="utf-8", newline="") as file:
            present = file.read()
    except FileNotFoundError:
        return FileMigration(shown, b"", helper_module.module(names, unit).encode(), is_new=True)
    except (OSError, ValueError) as error:
        raise Left("the module for its helpers cannot be read", "", f"{shown}: {error}") from error
    before = present.encode()
    known = helper_module.present_in(present)
    if helper_module.is_unchanged(present):
        return FileMigration(shown, before, helper_module.module(names | known, unit).encode())
    missing = ", ".join(sorted(names - known))
    if missing:
        raise Left(
            "the module for its helpers was changed by hand, and lacks some of them",
            "Give the path of another module: --helpers PATH.",
            f"{shown}: {missing}",
        )
    return FileMigration(shown, before, before)


_PMAP = _codes.PMAP_CALL
_NEEDS = (0, 8)
_BUILD_FILES = ("BUILD", "BUILD.bazel")


def cautions_of(
    files: Sequence[FileMigration], context: ProjectContext, options: MigrationOptions
) -> Iterator[str]:
    """The cautions of one migration, a sentence each.

    Args:
      files: what became of them.
      context: their projects.
      options: what was asked for.
    """
    places = [outcome for file in files for outcome in file.outcomes if outcome.status == "done"]
    if options.to == "global" or not any(outcome.code == _PMAP for outcome in places):
        return
    replicate = context.replicate_of_flax()
    if replicate is not None:
        yield (
            f"{replicate} uses flax.jax_utils.replicate, which stays: with jax 0.10 and newer it "
            "needs flax 0.12.7 or newer."
        )
    if options.to != "jax":
        return
    fake = context.fake()
    if fake is not None:
        yield (
            f"{fake} has jax.pmap replaced while it runs: mapped is not replaced there. In tests, "
            "give it as many devices as slices."
        )
    question = context.question_of_type
    if question is not None:
        yield (
            f"{question} knows functions of jax.pmap by their type, PmapFunction: those of mapped "
            "are of another, so what asks there is told that they are not mapped."
        )
    if context.sign is not None and not options.promises.one_process:
        yield (
            f"The program may run in several processes ({context.sign}). There, mapped keeps the "
            "view of jax.pmap; inside jit, grad or vmap it raises an error, where jax.pmap "
            "silently uses the devices of one process only."
        )
    asked = [each for each in map(config.lower_bound, context.graph.roots) if each is not None]
    if asked and min(asked) < _NEEDS:
        oldest = ".".join(map(str, min(asked)))
        yield f"What was written needs jax 0.8 or newer; the project asks for {oldest} or newer."
    for file in files:
        for name in _BUILD_FILES if file.is_new else ():
            build = os.path.join(os.path.dirname(file.path), name)
            if os.path.isfile(build):
                yield f"Add {os.path.basename(file.path)} to the sources in {build}."
    yield from _of_scripts(files)


def _of_scripts(files: Sequence[FileMigration]) -> Iterator[str]:
    """Where one module may do for scripts that get the helpers inside.

    A script finds a file beside it if Python is given its path, and not by `python -m`: the text
    does not say which it is, so that the user has to.
    """
    count = collections.Counter(
        os.path.dirname(file.path)
        for file in files
        if file.path.endswith(".py") and not file.is_new
        if helper_module.is_ours(file.after.decode("utf-8", "replace"))
        and not helper_module.is_ours(file.before.decode("utf-8", "replace"))
    )
    for folder, number in count.items():
        if number > 1:
            script, module = (os.path.join(folder, name) for name in ("FILE.py", "_mapped.py"))
            yield (
                f"{number} scripts in {folder or 'this folder'} get the helpers inside. If they "
                f"are run as `python {script}`, one module will do for them: --helpers {module}."
            )
