"""Real repositories: which pmap sites are found and migrated, and what is left, with the reason.

    python benchmarks/corpus.py                         # clones the repositories, then all of it
    python benchmarks/corpus.py --folder ~/checkouts    # they are there, as owner__name[@tag]
    python benchmarks/corpus.py --only ferminet --to jax --reasons
    python benchmarks/corpus.py --sample 20 --seed 1    # 20 random edits, to be read by hand
    python benchmarks/corpus.py ~/my/project            # a project of your own
    python benchmarks/corpus.py --suite ~/my/project -- python -m pytest tests

Each repository is taken at one commit. Its Python files and notebooks are copied, migrated in the
copy as `jax-dist migrate` would, and migrated again there: the second run must find nothing to do.
Nothing in a repository is run, but for `--suite`: that runs a command in a copy before and after
each migration, on 8 simulated devices and on 1, and compares how it ends.

Columns: `found` are the places that mean jax.pmap, by any name, in files and notebooks; `+n` of
them through a name for `partial(jax.pmap, ...)`. `counted` is the number of its uses by a script
that shares no code with the checker, of Python files only. For each target: how many were migrated,
and how many of the neighbours (device_put_replicated, removed names); files changed; lines added in
them for each place, but for blank ones; helper modules written; files that got helpers inside;
files that do not parse, that a second run changes again, or that do not keep their findings; CPU
seconds.
"""

import argparse
import ast
import collections
import contextlib
import dataclasses
import difflib
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

from jax_dist.checker.engine import linter
from jax_dist.checker.model import discovery, pmaps, sources
from jax_dist.checker.model.discovery import Patterns
from jax_dist.checker.model.project import Project
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.model.sources import UnreadableError
from jax_dist.codemod import helper_module, migration
from jax_dist.codemod.facts import Promises
from jax_dist.codemod.files import MigrationOptions
from jax_dist.codemod.results import FileMigration

_FAULT = "jax-dist failed on it"
_PMAP = "JXD001"


@dataclasses.dataclass(frozen=True)
class Repository:
    """A public repository at a commit."""

    name: str  # owner/name on GitHub
    commit: str
    sites: int | None  # uses of jax.pmap, counted apart from the checker; None: not counted
    tag: str = ""

    @property
    def folder(self) -> str:
        """What its checkout is called."""
        return self.name.replace("/", "__") + (f"@{self.tag}" if self.tag else "")


REPOSITORIES = (
    Repository("google-research/scenic", "4a38d475ee89cb821078c0e2bf2065ee030e1535", 147),
    Repository("EdanToledo/Stoix", "8fff19c94a478c1e1ff75fbf10396d488aa25d70", 63),
    Repository("google-deepmind/deepmind-research", "f5de0ede8430809180254ee957abf36ed62579ef", 49),
    Repository("google-deepmind/kfac-jax", "babd85368ca209861ac947c829c0cf57592f7d22", 22),
    Repository("google/flax", "cda7a4c85bbce744e412ab82e298ddf76d4770d2", 22, "v0.6.0"),
    Repository("google-deepmind/chex", "b4942e3e3cee9f4c87f3404d6b165ec375f59f70", 18),
    Repository("RobertTLange/evosax", "67b361b4c509a5e010a1351d7786cfa705f2c907", 17, "v.0.1.5"),
    Repository("instadeepai/Mava", "57c8e64059bd59005d80c1c8278eef65855253b9", 15),
    Repository("google/brax", "0b96d056328d15ea7ebfd3ce07f42be72ec76e40", 15),
    Repository("google-research/big_vision", "0127fb6b337ee2a27bf4e54dea79cff176527356", 13),
    Repository("google/flax", "18f8f311c275d57f46d95e41b15aa97b454754c0", 12),
    Repository("yang-song/score_sde", "0acb9e0ea3b8cccd935068cd9c657318fbc6ce4c", 12),
    Repository("mlcommons/algorithmic-efficiency", "2c90454fc05d5bdf3598b0c7651e611f132a7060", 8),
    Repository("pyro-ppl/numpyro", "0b935d488056ae1775b4ab05cbe2812f51f21a4f", 8),
    Repository("google-research/vision_transformer", "c6de1e5378c9831a8477feb30994971bdc409e46", 4),
    Repository("google/CommonLoopUtils", "04ad2f9edbd5c80f2307746d15a947fea43cb5e5", 4),
    Repository("instadeepai/jumanji", "590005b0fb305b1a98a4828bfb6b2ea28b47dd5b", 3),
    Repository("patrick-kidger/equinox", "9336d820b2ef66b360fc6cb3611b3da5cefbb14d", 3),
    Repository("google-research/nested-transformer", "59c0d6aa1a0526fbca15507a172f3dc110f52a3c", 2),
    Repository("google-deepmind/ferminet", "0ce3411104542e30723731c77e65c36977fb4d81", 2),
    Repository("google/evojax", "acf5252475e4fbf47e0e3f7994c03de11dd3c4ca", 2),
    Repository("Joshuaalbert/jaxns", "2f356d6d497ce3ac471fb9a06f9d22587487aaaa", 1),
    Repository("google/neural-tangents", "c17e770bb74f1771da7be4a69fabfa68b6078960", 1),
    # No pmap in these: whatever is found is wrong.
    Repository("google-research/t5x", "cc342d419ec3e3e9c4bf1df33c82330cafdc1e16", 0),
    Repository("atomicarchitects/nequix", "0ffdf881603d2c97f9105c64c3ec2df74dc1c224", 0),
    Repository("deepmind/dqn_zoo", "f87bb1f13d0e87c0724bc504e43d43019753cc43", 0),
    Repository("RobertTLange/evosax", "d4b4127708cb2cd0cc906b910ddcd091013153a9", 0),
)

TARGETS = {
    "jax_dist": MigrationOptions(to="jax_dist"),
    "jax": MigrationOptions(to="jax"),
    "promised": MigrationOptions(to="jax", promises=Promises(one_process=True, all_devices=True)),
    "idiomatic": MigrationOptions(to="jax", idiomatic=True, promises=Promises(one_process=True)),
}


@dataclasses.dataclass(frozen=True)
class Place:
    """What became of one place."""

    path: str  # within the repository
    line: str  # "12", or "cell 3:12"
    rule: str
    is_pmap: bool  # else a neighbour of pmap, or a removed name
    done: bool
    reason: str


@dataclasses.dataclass
class Result:
    """What one target did to one repository."""

    repository: str
    target: str
    places: list[Place] = dataclasses.field(default_factory=list)
    changed: list[str] = dataclasses.field(default_factory=list)
    added: int = 0  # lines that are not blank, in files that were there, helpers inside not counted
    modules: list[str] = dataclasses.field(default_factory=list)  # helpers that were written
    inside: list[str] = dataclasses.field(default_factory=list)  # files that have them inside
    direct: int = 0  # jax.shard_map calls that were written
    problems: dict[str, str] = dataclasses.field(default_factory=dict)  # files left whole
    broken: list[str] = dataclasses.field(default_factory=list)  # changed, and do not parse
    restless: list[str] = dataclasses.field(default_factory=list)  # a second run changes them
    unlike: list[str] = dataclasses.field(default_factory=list)  # left places differ by then
    seconds: float = 0.0  # CPU
    hunks: list[str] = dataclasses.field(default_factory=list)

    def count(self, *, pmap: bool, done: bool) -> int:
        return sum(each.is_pmap == pmap and each.done == done for each in self.places)


# --- getting the repositories


def checkout(repository: Repository, into: pathlib.Path) -> pathlib.Path:
    """A shallow clone of one commit, by the user's own git."""
    folder = into / repository.folder
    if folder.exists():
        return folder
    url = f"https://github.com/{repository.name}"
    for arguments in (
        ("init", "--quiet", str(folder)),
        ("-C", str(folder), "fetch", "--quiet", "--depth", "1", url, repository.commit),
        ("-C", str(folder), "checkout", "--quiet", "FETCH_HEAD"),
    ):
        subprocess.run(("git", *arguments), check=True)
    return folder


def files_of(folder: pathlib.Path) -> list[str]:
    """Its Python files and notebooks, as `jax-dist migrate` finds them."""
    return list(discovery.find([str(folder)], Patterns(discovery.EXCLUDED, str(folder))).files)


# --- looking at one


def found(folder: pathlib.Path) -> tuple[int, int]:
    """Places that mean jax.pmap by its own name or another; those through a name for a partial."""
    paths = files_of(folder)
    project = Project(paths)
    direct = bound = 0
    for path in paths:
        data = pathlib.Path(path).read_bytes()
        if not linter.wanted(data, frozenset({_PMAP})):
            continue
        with contextlib.suppress(UnreadableError, sources.ParseError):
            module = project.module(linter.load(path, data))
            for site in pmaps.sites(module):
                meaning = module.meaning(site.reference)
                if meaning is not None and meaning.is_partial:
                    bound += 1
                else:
                    direct += 1
    return direct, bound


def places_of(path: str, migrated: FileMigration) -> Iterator[Place]:
    """From what the library says to what is printed here."""
    for outcome in migrated.outcomes:
        line = f"{outcome.line}" if outcome.cell is None else f"cell {outcome.cell}:{outcome.line}"
        done = outcome.status == "done"
        # The idiomatic target speaks of the device axis where it takes pmap away.
        freed = outcome.code == "JXD204" and done and re.search(r"\bpmap\b", outcome.what)
        is_pmap = outcome.code == _PMAP or bool(freed)
        yield Place(path, line, outcome.code, is_pmap, done, outcome.reason)


def measured(repository: Repository, folder: pathlib.Path, target: str) -> Result:
    """Migrates a copy, and then the copy again."""
    result = Result(repository.folder, target)
    with tempfile.TemporaryDirectory() as name:
        copy = pathlib.Path(name) / folder.resolve().name
        _copied(folder, copy)
        (copy / ".git").mkdir(exist_ok=True)  # it is a project of its own
        start = time.process_time()
        first = _migrated(copy, target)
        result.seconds = time.process_time() - start
        for path, migrated in first.items():
            _note(result, path, migrated)
            if migrated.changed:
                (copy / path).write_bytes(migrated.after)
        second = _migrated(copy, target)
    result.restless = [path for path, migrated in second.items() if migrated.changed]
    result.unlike = [path for path in first if _left(first[path]) != _left(second.get(path))]
    return result


def _copied(folder: pathlib.Path, copy: pathlib.Path) -> None:
    skipped = shutil.ignore_patterns(".git", "*.ckpt", "*.npz", "*.png", "*.gif")
    shutil.copytree(folder, copy, symlinks=True, ignore=skipped)


def _migrated(copy: pathlib.Path, target: str) -> dict[str, FileMigration]:
    """What becomes of each file that holds anything to migrate, by its path within the copy."""
    made, _ = migration.migrate(files_of(copy), TARGETS[target])
    return {os.path.relpath(os.path.abspath(each.path), copy): each for each in made}


def _note(result: Result, path: str, migrated: FileMigration) -> None:
    result.places += places_of(path, migrated)
    if migrated.problem:
        result.problems[path] = migrated.problem
    if migrated.is_new:
        result.modules.append(path)
        return
    if migrated.changed:
        result.changed.append(path)
        before, after = _code(path, migrated.before), _code(path, migrated.after)
        if helper_module.LICENCE.encode() in migrated.after:
            result.inside.append(path)
        result.added += _added(before, after)
        written = _shard_maps(path, migrated.after) - _shard_maps(path, migrated.before)
        result.direct += sum(written.values())
        result.hunks += _hunks(f"{result.repository}/{path}", before, after)
        try:
            sources.parse(linter.load(path, migrated.after).python)
        except (UnreadableError, sources.ParseError):
            result.broken.append(path)


def _shard_maps(path: str, data: bytes) -> collections.Counter[str]:
    """The calls of jax.shard_map by any name, but for the helpers': what each maps, how often."""
    try:
        module = Module(linter.load(path, data))
    except (UnreadableError, sources.ParseError):
        return collections.Counter()
    calls = module.calls("jax.shard_map", "jax.experimental.shard_map.shard_map")
    around = [module.class_of(call) for call in calls]
    return collections.Counter(
        ast.unparse(call.args[0]) if call.args else ""
        for call, owner in zip(calls, around, strict=True)
        if owner is None or owner.name != "_Program"  # that of `mapped` in helpers inside
    )


def _code(path: str, data: bytes) -> str:
    """The code of a file, or of all cells of a notebook, without helpers that are inside."""
    try:
        source = linter.load(path, data)
    except UnreadableError:
        return ""
    text = source.code.decode("utf-8", "replace").replace("\r\n", "\n")
    if not helper_module.is_ours(text):
        return text
    python = source.python.decode("utf-8", "replace")
    bound = helper_module.bound_names(helper_module.present_in(python))
    own = {name for name, imported in bound.items() if not imported}
    lines = text.split("\n")
    first = lines.index(helper_module.LICENCE)
    nodes = [node for node in ast.parse(python).body if node.lineno > first]
    end = max(node.end_lineno or 0 for node in nodes if _bound_by(node) & own)
    return "\n".join(lines[:first]).rstrip("\n") + "\n" + "\n".join(lines[end:]).lstrip("\n")


def _bound_by(node: ast.stmt) -> set[str]:
    targets = [each.id for each in getattr(node, "targets", ()) if isinstance(each, ast.Name)]
    return {*targets, getattr(node, "name", "")}


def _added(before: str, after: str) -> int:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    changes = [line[:1] for line in lines if line[1:].strip(" -+")]  # no headings, no blanks
    return changes.count("+") - changes.count("-")


def _left(migrated: FileMigration | None) -> list[tuple[str, str]]:
    """What was left; lines are not compared, for they move."""
    outcomes = () if migrated is None else migrated.outcomes
    return sorted((each.code, _alike(each.reason)) for each in outcomes if each.status == "left")


def _alike(reason: str) -> str:
    """The reason without line numbers and without names in brackets."""
    return re.sub(r"\([\w.]+ in line \d+\)|\bline \d+", "...", reason)


def _hunks(name: str, before: str, after: str) -> Iterator[str]:
    lines: list[str] = []
    changes = difflib.unified_diff(before.splitlines(), after.splitlines(), n=4, lineterm="")
    for line in changes:
        if line.startswith(("---", "+++")):
            continue
        if line.startswith("@@") and lines:
            yield "\n".join((name, *lines))
            lines = []
        lines.append(line)
    if lines:
        yield "\n".join((name, *lines))


# --- running suites


def print_suites(projects: Sequence[str], command: Sequence[str], targets: Sequence[str]) -> bool:
    """Runs a command before and after each migration; whether it always ended alike."""
    alike = True
    for project in map(pathlib.Path, projects):
        for devices in (8, 1):
            with tempfile.TemporaryDirectory() as name:
                before = _ended(_prepared(project, pathlib.Path(name), None), command, devices)
            print(f"{project.name}, {devices} devices, before: {before}")
            for target in targets:
                with tempfile.TemporaryDirectory() as name:
                    after = _ended(_prepared(project, pathlib.Path(name), target), command, devices)
                alike = alike and after == before
                print(f"{'':4}{'same' if after == before else 'NOT THE SAME'}: {target}: {after}")
    return alike


def _prepared(project: pathlib.Path, into: pathlib.Path, target: str | None) -> pathlib.Path:
    copy = into / project.resolve().name
    _copied(project.resolve(), copy)
    (copy / ".git").mkdir(exist_ok=True)
    for path, migrated in () if target is None else _migrated(copy, target).items():
        if migrated.changed:
            (copy / path).write_bytes(migrated.after)
    return copy


def _ended(folder: pathlib.Path, command: Sequence[str], devices: int) -> str:
    """The exit code, and what pytest or unittest counted."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PYTHONHASHSEED": "0",
    }
    ended = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    counts = re.findall(
        r"(\d+) (passed|failed|error|errors|skipped|xfailed|xpassed)\b", ended.stdout
    )
    counts += [(number, "run") for number in re.findall(r"^Ran (\d+) tests?", ended.stdout, re.M)]
    counted = ", ".join(f"{number} {word}" for number, word in counts)
    return f"exit {ended.returncode}, {counted or 'nothing counted'}"


# --- printing


def print_table(rows: Sequence[tuple[Repository, tuple[int, int], Sequence[Result]]]) -> None:
    width = 63
    print(f"{'repository':<40}{'counted':>8}{'found':>9}", end="")
    for result in rows[0][2]:
        print(f" |{result.target:^{width}}", end="")
    print(f"\n{'':<57}", end="")
    head = f"{'pmap':>9}{'near':>9}{'files':>6}{'lines':>7}{'modules':>8}{'inside':>7}"
    for _ in rows[0][2]:
        print(f" |{head}{'broken':>7}{'sec':>10}", end="")
    print()
    for repository, (direct, bound), results in rows:
        counted = "-" if repository.sites is None else str(repository.sites)
        shown = f"{direct}+{bound}" if bound else str(direct)
        print(f"{repository.folder:<40}{counted:>8}{shown:>9}", end="")
        for result in results:
            _print_cells(result)
        print()


def _print_cells(result: Result) -> None:
    done, near = result.count(pmap=True, done=True), result.count(pmap=False, done=True)
    pmaps_ = done + result.count(pmap=True, done=False)
    nears = near + result.count(pmap=False, done=False)
    harmed = len({*result.broken, *result.restless, *result.unlike})
    cells = f"{f'{done}/{pmaps_}':>9}{f'{near}/{nears}':>9}{len(result.changed):>6}"
    cells += f"{result.added / max(1, done + near):>7.1f}{len(result.modules):>8}"
    cells += f"{len(result.inside):>7}{harmed:>7}{result.seconds:>10.2f}"
    print(f" |{cells}", end="")


def print_summary(rows: Sequence[tuple[Repository, tuple[int, int], Sequence[Result]]]) -> None:
    counted = sum(repository.sites or 0 for repository, _, _ in rows)
    direct = sum(min(found_[0], repository.sites or 0) for repository, found_, _ in rows)
    if counted:
        print(f"\nfound: {direct} of {counted} ({direct / counted:.1%}; goal 99%)")
    for number, first in enumerate(rows[0][2]):
        results = [results[number] for _, _, results in rows]
        done = sum(result.count(pmap=True, done=True) for result in results)
        near = sum(result.count(pmap=False, done=True) for result in results)
        sites = sum(sum(found_) for _, found_, _ in rows)
        goal = {"jax_dist": "; goal 99%", "jax": "; goal 95%"}.get(first.target, "")
        print(f"{first.target}: {done} of {sites} migrated ({done / max(1, sites):.1%}{goal})")
        added = sum(result.added for result in results)
        print(f"  lines added: {added}, {added / max(1, done + near):.2f} for each place")
        modules, inside = (sum(len(getattr(r, k)) for r in results) for k in ("modules", "inside"))
        print(f"  helper modules written: {modules}; files with helpers inside: {inside}")
        print(f"  jax.shard_map written: {sum(result.direct for result in results)}")
        mute = sum(not place.done and not place.reason for r in results for place in r.places)
        print(f"  left without a reason: {mute}")
        for what in ("broken", "restless", "unlike", "problems"):
            paths = [f"{r.repository}/{path}" for r in results for path in getattr(r, what)]
            print(f"  {_WORDS[what]}: {len(paths)}", *paths[:10])
        for result in results:
            for path, problem in result.problems.items():
                print(f"  {result.repository}/{path}: {problem}")


_WORDS = {
    "broken": "changed files that do not parse",
    "restless": "files that a second run changes",
    "unlike": "files where the second run leaves something else",
    "problems": "files left whole",
}


def print_reasons(results: Sequence[Result]) -> None:
    """How often each reason was given, and where first. Names and numbers in it count as alike."""
    for target in dict.fromkeys(result.target for result in results):
        counts: collections.Counter[tuple[str, str]] = collections.Counter()
        where: dict[tuple[str, str], str] = {}
        for result in results:
            for place in result.places:
                if result.target == target and not place.done:
                    key = (place.rule, _alike(place.reason))
                    counts[key] += 1
                    where.setdefault(key, f"{result.repository}/{place.path}:{place.line}")
        print(f"\nleft with --to {target}")
        for key, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
            print(f"{count:5}  {key[0]}  {key[1]}\n{'':14}{where[key]}")


def print_sample(results: Sequence[Result], count: int, seed: int) -> None:
    """Random places of the diffs, to be read by hand; not those that only define helpers."""
    hunks = [
        f"to {result.target}: {hunk}"
        for result in results
        for hunk in result.hunks
        if any(line.startswith("-") for line in hunk.splitlines()[1:])
    ]
    chosen = random.Random(seed).sample(hunks, min(count, len(hunks)))
    for number, hunk in enumerate(chosen, start=1):
        print(f"\n=== {number}/{len(chosen)} {hunk}")


def main(arguments: list[str]) -> int:
    command: list[str] = []
    if "--" in arguments:
        place = arguments.index("--")
        arguments, command = arguments[:place], arguments[place + 1 :]
    options = _parser().parse_args(arguments)
    if options.suite:
        alike = print_suites(options.projects, command, options.to or ("jax_dist", "jax"))
        return 0 if alike else 1
    with tempfile.TemporaryDirectory() as name:
        into = pathlib.Path(options.folder or name)
        rows = []
        for repository, folder in _chosen(options, into):
            counts = found(folder)
            results = [measured(repository, folder, target) for target in options.to or TARGETS]
            rows.append((repository, counts, results))
            print(f"looked at {repository.folder}", file=sys.stderr)
    print_table(rows)
    print_summary(rows)
    results = [result for row in rows for result in row[2]]
    if options.reasons:
        print_reasons(results)
    if options.sample:
        print_sample(results, options.sample, options.seed)
    if options.json:
        text = json.dumps([dataclasses.asdict(result) for result in results], indent=1)
        pathlib.Path(options.json).write_text(text + "\n")
    crashed = any(_FAULT in text for result in results for text in result.problems.values())
    harmed = any(result.broken or result.restless for result in results)
    return 1 if crashed or harmed else 0


def _chosen(
    options: argparse.Namespace, into: pathlib.Path
) -> Iterator[tuple[Repository, pathlib.Path]]:
    if options.projects:
        for project in map(pathlib.Path, options.projects):
            yield Repository(project.resolve().name, "", None), project
        return
    for repository in REPOSITORIES:
        if any(word in repository.folder for word in options.only or [""]):
            yield repository, checkout(repository, into)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("projects", nargs="*", help="folders of your own, in place of all that")
    parser.add_argument(
        "--suite",
        action="store_true",
        help="run the command behind -- in a copy of each folder, before and after",
    )
    parser.add_argument("--folder", help="where the checkouts are, or are to be made and kept")
    parser.add_argument("--only", action="append", help="a part of a repository's name")
    parser.add_argument(
        "--to", action="append", choices=list(TARGETS), help="by default each in turn"
    )
    parser.add_argument(
        "--reasons", action="store_true", help="why places were left, and how often"
    )
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="print N random edits")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--json", metavar="FILE", help="all results, for machines")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
