"""What the options of `jax-dist lint` and the settings of a project ask for, together."""

import argparse
from collections.abc import Sequence

from jax_dist._usage import MisuseError, hint
from jax_dist.checker import output
from jax_dist.checker.engine import requirement
from jax_dist.checker.engine.catalogue import PAGES
from jax_dist.checker.engine.config import Choice, Config, known, selected, split
from jax_dist.checker.engine.linter import Examiner
from jax_dist.checker.model.discovery import Patterns
from jax_dist.checker.model.project import Project

STDIN = "-"


def check(options: argparse.Namespace) -> None:
    """Raises MisuseError where options contradict each other."""
    if STDIN in options.paths and len(options.paths) > 1:
        raise MisuseError("- reads the standard input, and goes with no other path")
    if options.unsafe_fixes and not (options.fix or options.diff):
        raise MisuseError("say --fix with --unsafe-fixes to make the fixes, or --diff to see them")
    ways = ("fix", "diff", "add_noqa", "write_baseline")
    asked = [f"--{way.replace('_', '-')}" for way in ways if getattr(options, way)]
    if len(asked) > 1 and asked != ["--fix", "--diff"]:
        raise MisuseError(f"{' and '.join(asked)} do not go together")
    if options.add_noqa and STDIN in options.paths:
        raise MisuseError("--add-noqa needs files, not the standard input")
    if options.output_format not in output.FORMATS:  # argparse does not look at the environment
        remedy = hint(options.output_format, output.FORMATS, f"Say {', '.join(output.FORMATS)}.")
        raise MisuseError(f"$JAX_DIST_OUTPUT_FORMAT is {options.output_format!r}. {remedy}")


def examiner(options: argparse.Namespace, config: Config, paths: Sequence[str]) -> Examiner:
    """What to look for.

    Raises:
      MisuseError: an option names a rule or a version that is none.
    """
    asked = Choice(
        select=split(options.select) if options.select else None,
        extend_select=split(options.extend_select),
        ignore=split(options.ignore),
    )
    target = options.target_jax
    return Examiner(
        codes=selected([config.choice, asked], PAGES),
        project=Project((*config.project_roots, *paths)),
        target=requirement.version(target) if target else config.target_jax,
        ignores=tuple(
            (
                Patterns((glob,), config.folder),
                frozenset().union(*(known(code, PAGES) for code in codes)),
            )
            for glob, codes in config.per_file_ignores
        ),
    )
