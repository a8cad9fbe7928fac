"""What files of a project become, and programs that several tests give it."""

from typing import Any

from jax_dist.migrate import migration
from jax_dist.migrate.migration import MigrationOptions
from jax_dist.migrate.pmap_facts import Promises
from jax_dist.migrate.results import FileMigration

CONSTANTS = """\
import functools

import jax

AXIS = "qmc"
pmap = functools.partial(jax.pmap, axis_name=AXIS)
"""
USER = """\
import functools

from pkg import constants


@functools.partial(constants.pmap, donate_argnums=(0,))
def step(x):
    return x
"""


def migrate(
    *paths: str, to: Any = "jax_dist", full_helpers: bool = False, **options
) -> list[FileMigration]:
    asked = MigrationOptions(to=to, full_helpers=full_helpers)
    found, _ = migration.migrate(paths, asked, **options)
    return found


PROMISED = MigrationOptions(to="jax", promises=Promises(one_process=True, all_devices=True))


def direct(*paths: str) -> list[bytes]:
    """The new texts as plain JAX, of a program in one process on all devices."""
    return [each.after for each in migration.migrate(paths, PROMISED)[0]]


def said(found: FileMigration) -> list[tuple[str, str, str]]:
    return [(place.status, place.reason, place.detail) for place in found.outcomes]


def written(found: list[FileMigration]) -> dict[str, str]:
    """The new texts of the files that change, by their paths."""
    return {each.path: each.after.decode() for each in found if each.changed}
