"""The files that hold helpers: modules that are new or get more, and what may be inside a file."""

import os
from collections.abc import Collection

from jax_dist.lint.model import new_imports, sources
from jax_dist.lint.model.findings import indentation_of
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.sources import Source
from jax_dist.migrate import helper_homes, helper_module, imports
from jax_dist.migrate.codegen import HelperNames
from jax_dist.migrate.results import FileMigration, Helpers, Left

_MOST_INSIDE = 90  # lines


def with_modules(found: list[FileMigration]) -> list[FileMigration]:
    """The files and their helper modules: new ones, and those that get more than they have.

    Files whose module cannot have what they need are left.
    """
    users: dict[str, list[int]] = {}
    needs: dict[str, frozenset[str]] = {}
    for position, migrated in enumerate(found):
        if migrated.helpers is not None:
            path = migrated.helpers.path
            users.setdefault(path, []).append(position)
            own = migrated.helpers.needs
            others = needs.setdefault(path, own)
            # What lies on the devices of one file may come to the other one.
            unlike = {"mapped"} <= own & others and "devices" in own ^ others
            needs[path] = others | own | ({"axes"} if unlike else set())
    # Of two scripts in one process, the second may get the module of the first by its name.
    beside = {path for path in needs if not helper_homes.is_within_package(path)}
    together = frozenset().union(*(needs[path] for path in beside))
    modules: list[FileMigration] = []
    for path, positions in sorted(users.items()):
        first = found[positions[0]].after.decode("utf-8", "replace")
        try:
            more = together if path in beside else frozenset()
            modules.append(_module(path, needs[path], more, indentation_of(first)))
        except Left as left:
            for each in positions:
                found[each] = found[each].left_whole(left)
    return [*found, *modules]


def _module(path: str, needs: frozenset[str], more: frozenset[str], unit: str) -> FileMigration:
    """The module with what it must have, and `more` where it may be written. Raises Left."""
    shown = os.path.relpath(path)
    text = lambda known: helper_module.module(needs | more | known, unit).encode()
    try:
        with open(path, encoding="utf-8", newline="") as file:
            present = file.read()
    except FileNotFoundError:
        return FileMigration(shown, b"", text(frozenset()), is_new=True)
    except (OSError, ValueError) as error:
        raise Left("the module for its helpers cannot be read", "", f"{shown}: {error}") from error
    before = present.encode()
    known = helper_module.present_in(present)
    if helper_module.is_unchanged(present):
        return FileMigration(shown, before, text(known))
    missing = ", ".join(sorted(needs - known))
    if missing:
        raise Left(
            "the module for its helpers was changed by hand, and lacks some of them",
            "Give the path of another module: --helpers PATH.",
            f"{shown}: {missing}",
        )
    return FileMigration(shown, before, before)


def placed(
    module: Module, helpers: HelperNames, unit: str, *, full: bool
) -> tuple[Source, Helpers | None]:
    """A file with its helpers, where these are inside of it; else what it imports of their module.

    Args:
      module: the new text.
      helpers: what it uses.
      unit: one step of indentation.
      full: whether a block of any length may be inside.

    Raises:
      Left: they are too long for it, or it has some that can do less.
    """
    source, home = module.source, helpers.home
    parts = helpers.used & frozenset(helper_module.ALL_PARTS)
    if not home.is_inside:
        names = home.imported_by(module.tree)
        return source, Helpers(home.path, names | parts) if names else None
    loads = {name for each in module.scopes.all for name in each.loads}
    bindings = module.scopes.module.bindings
    missing = {name for name in helpers.used if name in loads and name not in bindings}
    if {"mapped", "per_device"} & loads - missing:
        _check_present(source.python.decode("utf-8", "replace"), parts)
    if not missing:
        return source, None
    text = helper_module.block(missing | parts, unit, new_imports.names_above(source))
    if not full and text.count("\n") >= _MOST_INSIDE:
        raise Left(
            f"its helpers are longer than {_MOST_INSIDE} lines, which is much for the inside",
            "Give the path of a module for them: --helpers PATH. Or have them inside: "
            "--helpers full.",
        )
    found = new_imports.with_block(source, text)
    early = imports.read_too_early(sources.parse(found.python))
    is_below = not missing.isdisjoint(early)  # the cell of the imports uses them too
    return new_imports.with_block(source, text, in_cell=True) if is_below else found, None


def _check_present(text: str, parts: Collection[str]) -> None:
    """That `mapped`, which a file has from an earlier migration, can do all. Raises Left."""
    lacking = set(parts) - helper_module.present_in(text)
    if lacking:
        raise Left(
            "its helpers are from an earlier migration, and can do less than is needed now",
            "Give the path of a module for them: --helpers PATH.",
            ", ".join(sorted(lacking)),
        )
