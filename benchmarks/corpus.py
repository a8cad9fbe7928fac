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
and how many of the neighbours (device_put_replicated, the pmap of equinox and of flax.nnx, removed
names); files changed; lines added in them for each place, but for blank ones; helper modules
written; files that got helpers inside; files that do not parse, that a second run changes again, or
that do not keep their findings; CPU seconds. `sec` is what the repository took by the clock; its
line is printed when it is done.
"""

import argparse
import ast
import collections
import contextlib
import dataclasses
import difflib
import gc
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
from collections.abc import Container, Iterator, Sequence
from typing import TypeAlias

from jax_dist.lint.engine import linter
from jax_dist.lint.model import pmaps, sources
from jax_dist.lint.model.project import Project
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.sources import Patterns, UnreadableError
from jax_dist.migrate import helper_module, migration
from jax_dist.migrate.migration import MigrationOptions
from jax_dist.migrate.pmap_facts import Promises
from jax_dist.migrate.results import FileMigration

_FAULT = "jax-dist failed on it"
_PMAP = "JXD001"


@dataclasses.dataclass(frozen=True)
class Repository:
    """A public repository at a commit."""

    name: str  # owner/name on GitHub
    commit: str
    sites: int | None = None  # uses of jax.pmap, counted apart from the checker
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
    # Looked at later; their places are counted by name only.
    Repository("borisdayma/dalle-mini", "f0be4de610285a002052024a1e096126f9452cc4"),
    Repository("facebookresearch/jepa", "51c59d518fc63c08464af6de585f78ac0c7ed4d5"),
    Repository("google-deepmind/acme", "770bc75e948cc276c785ebfcf3de0b0812b95e26"),
    Repository("google-deepmind/alphafold", "c77e5d2a8961d1a353632c462914ff0a32a950f6"),
    Repository("google-deepmind/distrax", "f51bffcf9094d269a0be8678762dd2849833c8b7"),
    Repository("google-deepmind/dm-haiku", "f4d858a5cbb29140855d68f81f5fd625e078a5ae"),
    Repository("google-deepmind/enn", "da8ec7612d0d6b291e08d9af19c3273059a122ba"),
    Repository("google-deepmind/nuclease_design", "8152b9a6fab95acb70f22e0d9a438df016f20fde"),
    Repository("google-deepmind/optax", "2edbcbe2390da13983b92cbef94ac0460ecde1c5"),
    Repository("google-deepmind/rlax", "4c5d25b2609879d321f5a432cdf88165574e57a7"),
    Repository("google-research/jax3d", "5e21a547e82aff9340a76385ae235493bb404ac0"),
    Repository("google-research/long-range-arena", "cd31e5c6b8e5bceabd28de2d2afb23f7ae5d36d8"),
    Repository("google-research/multinerf", "5b4d4f64608ec8077222c52fdf814d40acc10bc1"),
    Repository("google-research/sam", "dae9904c4cf3a57a304f7b04cecffe371679c702"),
    Repository("google-research/slot-attention-video", "ba8f15ee19472c6f9425c9647daf87910f17b605"),
    Repository("google-research/vmoe", "942a78bc81d2e63199f0933733582ddae0715416"),
    Repository("google/hypernerf", "d433ebeba4ddd91fd83aa9af3423333d2d5934e7"),
    Repository("google/learned_optimization", "32186aa46a96f26ba0625755f93c55659adcd523"),
    Repository("google/nerfies", "1a38512214cfa14286ef0561992cca9398265e13"),
    Repository("google/objax", "9dd7dc37e5f9d0ea71896636d3e180440b2b729e"),
    Repository("google/trax", "7c189c2c3a37851df7fc641b322a99bbe9f8aa10"),
    Repository("google/uncertainty-baselines", "163351d4c92340a80e572bc376ec837d8e96399d"),
    Repository("huggingface/diffusers", "58eb52c0803ea9af3abec60841c2a093bdf1f951"),
    Repository("n2cholas/jax-resnet", "5b00735aa0a68ec239af4a728ad4a596c1b551f6"),
    Repository("poets-ai/elegy", "4709ce8dc9dde3925ce717e2358ce49112e36398"),
    Repository("sail-sg/envpool", "9cbcd267d6ae04eef1865e061b6a2bc356c36d0b"),
    Repository("vwxyzjn/cleanba", "d1f8979c33e4e1c3d4e67f460afcebb42b6889d4"),
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
class Spot:
    """A place that means jax.pmap."""

    path: str  # within the repository
    line: str  # "12", or "cell 3:12"
    through_partial: bool  # by a name that is bound to partial(jax.pmap, ...)


@dataclasses.dataclass(frozen=True)
class Place:
    """What became of one place."""

    path: str  # within the repository
    line: str  # "12", or "cell 3:12"
    rule: str
    is_pmap: bool  # of jax; else a neighbour, a library's own pmap, or a removed name
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


# A repository, what `found` found, and what each target did to it.
Row: TypeAlias = tuple[Repository, Sequence[Spot], Sequence[Result]]


# --- getting the repositories


def checkout(repository: Repository, into: pathlib.Path) -> pathlib.Path:
    """A shallow clone of one commit, by the user's own git."""
    folder = into / repository.folder
    if folder.exists():
        return folder
    url = f"https://github.com/{repository.name}"
    with tempfile.TemporaryDirectory(dir=into) as name:
        for arguments in (
            ("init", "--quiet"),
            ("fetch", "--quiet", "--depth", "1", url, repository.commit),
            ("checkout", "--quiet", "FETCH_HEAD"),
        ):
            subprocess.run(("git", "-C", name, *arguments), check=True)
        shutil.copytree(name, folder, symlinks=True)
    return folder


def files_of(folder: pathlib.Path) -> list[str]:
    """Its Python files and notebooks, as `jax-dist migrate` finds them."""
    return list(sources.find_files([str(folder)], Patterns(sources.EXCLUDED, str(folder))).files)


# --- looking at one


def found(folder: pathlib.Path) -> list[Spot]:
    """The places that mean jax.pmap, by its own name or another."""
    paths = files_of(folder)
    project = Project(paths)
    spots: list[Spot] = []
    for path in paths:
        data = pathlib.Path(path).read_bytes()
        if not linter.wanted(data, frozenset({_PMAP})):
            continue
        within = os.path.relpath(path, folder)
        with contextlib.suppress(UnreadableError, sources.ParseError):
            module = project.module(linter.load(path, data))
            for site in pmaps.sites(module):
                meaning = module.meaning(site.reference)
                start = module.source.position(module.span(site.reference)[0])
                through_partial = meaning is not None and meaning.is_partial
                spots.append(Spot(within, _line(start.line, start.cell), through_partial))
    return spots


def _line(line: int, cell: int | None) -> str:
    return f"{line}" if cell is None else f"cell {cell}:{line}"


def places_of(
    path: str, migrated: FileMigration, of_pmap: Container[tuple[str, str]]
) -> Iterator[Place]:
    """From what the library says to what is printed here."""
    for outcome in migrated.outcomes:
        line = _line(outcome.line, outcome.cell)
        done = outcome.status == "done"
        # The idiomatic target speaks of the device axis where it takes pmap away.
        freed = outcome.code == "JXD204" and done and re.search(r"\bpmap\b", outcome.what)
        is_pmap = (outcome.code == _PMAP and (path, line) in of_pmap) or bool(freed)
        yield Place(path, line, outcome.code, is_pmap, done, outcome.reason)


def measured(
    repository: Repository, copy: pathlib.Path, target: str, spots: Sequence[Spot]
) -> Result:
    """Migrates a copy, and then the copy again; it is as before in the end."""
    of_pmap = {(spot.path, spot.line) for spot in spots}
    result = Result(repository.folder, target)
    start = time.process_time()
    first = _migrated(copy, target)
    result.seconds = time.process_time() - start
    for path, migrated in first.items():
        result.places += places_of(path, migrated, of_pmap)
        _note(result, path, migrated)
        if migrated.changed:
            (copy / path).write_bytes(migrated.after)
    second = _migrated(copy, target)
    gc.collect()
    for path, migrated in first.items():
        if migrated.is_new:
            (copy / path).unlink()
        elif migrated.changed:
            (copy / path).write_bytes(migrated.before)
    result.restless = [path for path, migrated in second.items() if migrated.changed]
    result.unlike = [path for path in first if _left(first[path]) != _left(second.get(path))]
    return result


@contextlib.contextmanager
def _copy_of(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A copy that is a project of its own, without what no migration reads."""
    skipped = shutil.ignore_patterns(".git", "*.ckpt", "*.npz", "*.png", "*.gif")
    with tempfile.TemporaryDirectory() as name:
        copy = pathlib.Path(name) / folder.resolve().name
        shutil.copytree(folder, copy, symlinks=True, ignore=skipped)
        (copy / ".git").mkdir()
        yield copy


def _migrated(copy: pathlib.Path, target: str) -> dict[str, FileMigration]:
    """What becomes of each file that holds anything to migrate, by its path within the copy."""
    made, _ = migration.migrate(files_of(copy), TARGETS[target])
    return {os.path.relpath(os.path.abspath(each.path), copy): each for each in made}


def _note(result: Result, path: str, migrated: FileMigration) -> None:
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
        try:
            sources.parse(linter.load(path, migrated.after).python)
        except (UnreadableError, sources.ParseError):
            result.broken.append(path)
            return
        written = _shard_maps(path, migrated.after) - _shard_maps(path, migrated.before)
        result.direct += sum(written.values())
        result.hunks += _hunks(f"{result.repository}/{path}", before, after)


def _shard_maps(path: str, data: bytes) -> collections.Counter[str]:
    """The calls of jax.shard_map by any name, but for the helpers': what each maps, how often."""
    if b"shard_map" not in data:
        return collections.Counter()
    module = Module(linter.load(path, data))
    calls = module.calls("jax.shard_map", "jax.experimental.shard_map.shard_map")
    around = [module.class_of(call) or module.function(call) for call in calls]
    helpers = ("_Program", "program")  # of `mapped` in helpers inside
    return collections.Counter(
        ast.unparse(call.args[0]) if call.args else ""
        for call, owner in zip(calls, around, strict=True)
        if getattr(owner, "name", "") not in helpers
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
            with _copy_of(project) as copy:
                before = _ended(copy, command, devices)
            print(f"{project.name}, {devices} devices, before: {before}", flush=True)
            for target in targets:
                with _copy_of(project) as copy:
                    for path, migrated in _migrated(copy, target).items():
                        if migrated.changed:
                            (copy / path).write_bytes(migrated.after)
                    after = _ended(copy, command, devices)
                alike = alike and after == before
                word = "same" if after == before else "NOT THE SAME"
                print(f"{'':4}{word}: {target}: {after}", flush=True)
    return alike


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


def print_head(targets: Sequence[str]) -> None:
    print(f"{'repository':<40}{'counted':>8}{'found':>9}{'sec':>7}", end="")
    for target in targets:
        print(f" |{target:^63}", end="")
    print(f"\n{'':<64}", end="")
    head = f"{'pmap':>9}{'near':>9}{'files':>6}{'lines':>7}{'modules':>8}{'inside':>7}"
    for _ in targets:
        print(f" |{head}{'broken':>7}{'CPU s':>10}", end="")
    print(flush=True)


def print_row(row: Row, seconds: float) -> None:
    repository, spots, results = row
    bound = sum(spot.through_partial for spot in spots)
    direct = len(spots) - bound
    counted = "-" if repository.sites is None else str(repository.sites)
    shown = f"{direct}+{bound}" if bound else str(direct)
    print(f"{repository.folder:<40}{counted:>8}{shown:>9}{seconds:>7.0f}", end="")
    for result in results:
        _print_cells(result)
    print(flush=True)


def _print_cells(result: Result) -> None:
    done, near = result.count(pmap=True, done=True), result.count(pmap=False, done=True)
    pmaps_ = done + result.count(pmap=True, done=False)
    nears = near + result.count(pmap=False, done=False)
    harmed = len({*result.broken, *result.restless, *result.unlike})
    cells = f"{f'{done}/{pmaps_}':>9}{f'{near}/{nears}':>9}{len(result.changed):>6}"
    cells += f"{result.added / max(1, done + near):>7.1f}{len(result.modules):>8}"
    cells += f"{len(result.inside):>7}{harmed:>7}{result.seconds:>10.2f}"
    print(f" |{cells}", end="")


def print_summary(rows: Sequence[Row]) -> None:
    counted = sum(repository.sites or 0 for repository, _, _ in rows)
    direct = sum(
        min(sum(not spot.through_partial for spot in spots), repository.sites or 0)
        for repository, spots, _ in rows
    )
    if counted:
        print(f"\nfound: {direct} of {counted} ({direct / counted:.1%}; goal 99%)")
    for number, first in enumerate(rows[0][2]):
        results = [results[number] for _, _, results in rows]
        done = sum(result.count(pmap=True, done=True) for result in results)
        near = sum(result.count(pmap=False, done=True) for result in results)
        sites = sum(len(spots) for _, spots, _ in rows)
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
    targets = options.to or tuple(TARGETS)
    gc.disable()  # looking for cycles among millions of nodes would take longer than all else
    rows: list[Row] = []
    print_head(targets)
    with tempfile.TemporaryDirectory() as name:
        for repository, folder in _chosen(options, pathlib.Path(options.folder or name)):
            start = time.monotonic()
            with _copy_of(folder) as copy:
                spots = found(copy)
                results = [measured(repository, copy, target, spots) for target in targets]
            rows.append((repository, spots, results))
            print_row(rows[-1], time.monotonic() - start)
    if not rows:
        return 1
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
            try:
                folder = checkout(repository, into)
            except subprocess.CalledProcessError as error:
                print(f"{repository.folder}: not fetched ({error})")
            else:
                yield repository, folder


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
