"""Starts the language server: findings, quick fixes and pages of rules in an editor.

It speaks the Language Server Protocol over its standard streams; an editor starts it.
"""

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

from jax_dist.commands import terminal
from jax_dist.commands.terminal import Exit

if TYPE_CHECKING:
    from jax_dist.checker.model.sources import Source

_EPILOG = """\
exit codes: 0 ended by the editor, 1 ended without a shutdown request,
            2 a package that it needs is not installed

examples:
  pip install "pygls>=2.0"         the package that it needs
  jax-dist server                  the command to give to the editor, for Python files

in Neovim:
  vim.lsp.start({ name = "jax-dist", cmd = { "jax-dist", "server" } })
"""


def add_parser(commands: Any) -> None:
    terminal.add_command(
        commands, "server", run, __doc__, _EPILOG, help="language server for editors"
    )


def run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> Exit:
    del options, out  # the protocol owns the process's own streams
    try:
        from jax_dist.checker.output import lsp
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("pygls", "lsprotocol"):
            raise
        print(
            f'jax-dist server: {error.name} is not installed. Run: pip install "pygls>=2.0"',
            file=err,
        )
        return Exit.USAGE
    started = lsp.create(_migrated)
    # A descriptor of its own: it is closed when the editor says exit.
    with open(os.dup(sys.stdout.fileno()), "wb") as stream:
        started.start_io(stdout=stream)
    return Exit(started.exit_code)


def _migrated(source: "Source", line: int) -> bytes | None:
    """The code with the pmaps of one line migrated to jax_dist; None where they are left."""
    # Not at the top: most sessions never ask.
    from jax_dist.checker.model.project import Project
    from jax_dist.codemod import migration, results
    from jax_dist.codemod.results import ProjectContext

    # No other place goes with it, so a function that is compared with jax.pmap must stay.
    context = ProjectContext(Project((source.path,)), among={})
    if any(is_compared for _, is_compared in results.meetings(context.project.module(source))):
        return None
    found = migration.of_source(source, context, migration.MigrationOptions())
    others = {each.line for each in found.outcomes} - {line}
    limits = dict.fromkeys(((source.path, other) for other in others), results.Form.LEFT)
    options = migration.MigrationOptions(limits=limits)
    done = migration.of_source(source, context, options)
    return done.after if done.changed else None
