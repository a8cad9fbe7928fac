"""Public repositories: how many places each target migrates, and why the others stay.

    python benchmarks/corpus.py brax vision_transformer       # checkouts, or any project
    python benchmarks/corpus.py --to shard_map --reasons ~/checkouts/*
    python benchmarks/corpus.py --sample 20 --seed 1 scenic   # random hunks, to be read

Nothing is written, and nothing in a repository is run. `hands` are the places that mean jax.pmap by
a script that shares no code with the codemod. `again` are files that a second run would change.
"""

import argparse
import ast
import collections
import os
import pathlib
import random
import re
import time
from collections.abc import Iterator, Sequence

from jax_dist.lint.engine import fixer, linter
from jax_dist.lint.model import sources
from jax_dist.lint.model.sources import Patterns
from jax_dist.migrate import migration
from jax_dist.migrate.migration import MigrationOptions
from jax_dist.migrate.places import TARGETS, FileMigration


def by_hand(folder: pathlib.Path) -> int:
    """Return the number of `jax.pmap` and imported `pmap` in Python files, found by `ast`."""
    count = 0
    for path in folder.rglob("*.py"):
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        imported = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "jax"
            for alias in node.names
            if alias.name == "pmap"
        }
        for node in ast.walk(tree):
            is_attribute = isinstance(node, ast.Attribute) and ast.unparse(node) == "jax.pmap"
            is_name = isinstance(node, ast.Name) and node.id in imported
            count += is_attribute or is_name
    return count


def hunks(files: Sequence[FileMigration]) -> Iterator[str]:
    """Yield the hunks of the diffs, each with its file."""
    for file in files:
        if file.changed and not file.is_new:
            encoding = linter.load(file.path, file.before).encoding
            text = fixer.diff(file.path, file.before, file.after, encoding)
            head, *rest = re.split(r"(?m)^(?=@@ )", text)
            yield from (head.splitlines()[0] + "\n" + hunk for hunk in rest)


def again(files: Sequence[FileMigration], options: MigrationOptions) -> int:
    """Return how many migrated files a second run would change."""
    second = (
        migration.migrate_text(file.path, file.after, options)
        for file in files
        if file.changed and not file.is_new
    )
    return sum(result is not None and result.changed for result in second)


def row(folder: pathlib.Path, options: argparse.Namespace) -> list[FileMigration]:
    """Print one repository's row, and return its files."""
    os.chdir(folder)
    paths = sources.find_files(["."], Patterns((), ".")).files
    target = MigrationOptions(to=options.to)
    start = time.process_time()
    files = migration.migrate(paths, target)
    seconds = time.process_time() - start
    forms = collections.Counter(
        place.form for file in files for place in file.places if place.status == "done"
    )
    left = sum(place.status == "left" for file in files for place in file.places)
    changed = sum(file.changed for file in files)
    broken = sum(bool(file.problem) for file in files)
    forms_text = " ".join(f"{form or 'fixed'} {count}" for form, count in forms.most_common())
    print(
        f"{folder.name:28} hands {by_hand(folder):4}  left {left:3}  files {changed:3}  "
        f"again {again(files, target)}  problems {broken}  {seconds:5.1f} s  {forms_text}",
        flush=True,
    )
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=pathlib.Path)
    parser.add_argument("--to", choices=TARGETS, default="jax_dist")
    parser.add_argument("--reasons", action="store_true", help="why places were left")
    parser.add_argument("--sample", type=int, default=0, help="print so many hunks")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    files: list[FileMigration] = []
    texts: list[str] = []
    for folder in [folder.resolve() for folder in options.folders]:
        repository = row(folder, options)
        texts += hunks(repository)
        files += repository
    left = [place for file in files for place in file.places if place.status == "left"]
    if options.reasons:
        for reason, count in collections.Counter(place.reason for place in left).most_common():
            print(f"{count:5} {reason}")
    for text in random.Random(options.seed).sample(texts, min(options.sample, len(texts))):
        print(text)


if __name__ == "__main__":
    main()
