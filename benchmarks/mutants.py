"""Mutants: of the lines that soundness rests on, which may be wrong without a test that fails?

    python benchmarks/mutants.py                                  all of them; hours
    python benchmarks/mutants.py --only jax_dist/passes/hazards.py         one file; minutes
    python benchmarks/mutants.py --only jax_dist/passes/hazards.py:90-130  some lines of it
    python benchmarks/mutants.py --sample 12 --seconds 60 --seed x   12 of one file that x draws
    python benchmarks/mutants.py --again run.json     what survived in a run with --json run.json
    python benchmarks/mutants.py --list --only jax_dist/multihost/job.py   what would be tried

A mutant is a file with one mistake: another comparison or operator, `and` for `or`, a condition or
an element less, a branch that is never taken, a constant one more, a statement less, arguments
swapped. It is caught if one of the tests that run its statement fails, does not end, or dies; the
quickest are tried first. Annotations, docstrings and the texts of errors are left alone.

The tree is never changed: each job has a copy in a temporary folder. Which test runs which
statement is found once for each file of tests, and is kept in build/mutants. A mutant is tried in a
process that has the tests ready, as `mutant_tests.py` says; a test that fails there has to pass
without the mistake right after, and what survives there is tried again in a process of its own.

`mutants.toml` lists the mutants that change nothing, with the reason, and the files of which all
others are caught: a sample is of one of these. There, `x -> *` stands for all that x may become.
Prints every survivor that is not listed, and a table. Exit code 1: there is one, or a listed mutant
is no more.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import hashlib
import json
import pathlib
import queue
import random
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import mutations
from mutant_tests import ROOT, SEEN, Job
from mutations import Mutant

_WITHOUT_EFFECT = pathlib.Path(__file__).with_suffix(".toml")
_KEPT = ROOT / "build" / "mutants"
_FORM = "3"  # of what is kept there
_MOST_SECONDS = 5.0  # of tests, for one mutant, if nothing else is said

_UNIFORMITY = tuple(f"tests/passes/test_{name}.py" for name in ("uniformity", "invariance"))
_GATHERS = tuple(
    f"tests/passes/test_{name}.py"
    for name in ("gather_steps", "gathers", "gathers_rules", "gathers_axes")
)
_PROVED = ("normal_form", "slices_refused", "certificate", "slices", "altered_texts")
_VIEWS = tuple(f"tests/global_views/test_{name}.py" for name in ("islands", "drawn_steps"))


def _codemod(*names: str) -> tuple[str, ...]:
    folder = ROOT / "tests" / "codemod"
    found = (path for name in names for path in folder.rglob(f"test_{name}.py"))
    return tuple(path.relative_to(ROOT).as_posix() for path in found)


# What is mutated, and the tests that look at it. Files that are not there are passed over.
TARGETS: dict[str, Sequence[str]] = {
    "jax_dist/primitives.py": ("tests/test_primitives.py", "tests/passes/test_uniformity.py"),
    "jax_dist/uniformity.py": _UNIFORMITY,
    "jax_dist/passes/primitive_facts.py": (
        *("tests/passes/test_primitive_facts.py", "tests/test_primitives.py"),
    ),
    "jax_dist/passes/uniformity.py": _UNIFORMITY,
    "jax_dist/passes/hazards.py": (
        *("tests/passes/test_randomness.py", "tests/rewriting/test_gradients.py"),
    ),
    "jax_dist/passes/gathers.py": _GATHERS,
    "jax_dist/passes/gather_rules.py": _GATHERS,
    "jax_dist/passes/gather_states.py": ("tests/passes/test_gather_states.py", *_GATHERS),
    "jax_dist/global_views/islands.py": _VIEWS,
    "jax_dist/multihost/job.py": ("tests/multihost/test_job.py",),
    "jax_dist/codemod/device_axis/fixed_programs.py": _codemod("fixed_programs"),
    "jax_dist/codemod/verify/slices.py": _codemod(*_PROVED, "host_edits"),
    "jax_dist/codemod/verify/text_uniformity.py": _codemod(*_PROVED),
    "jax_dist/codemod/verify/equivalence.py": _codemod(*_PROVED),
    "jax_dist/codemod/verify/calls.py": _codemod("comparison", "compared_calls"),
    "jax_dist/codemod/verify/certificate.py": _codemod("certificate"),
    "jax_dist/codemod/verify/comparison.py": _codemod("verdicts", "matching"),
    "jax_dist/codemod/verify/edits.py": _codemod("edits"),
    "jax_dist/codemod/verify/evidence.py": _codemod("evidence"),
    "jax_dist/codemod/verify/judging.py": _codemod("judgements", "trial"),
    "jax_dist/codemod/verify/ledger.py": _codemod("ledger"),
    "jax_dist/codemod/verify/program_text.py": _codemod("program_text"),
    "jax_dist/codemod/verify/trial.py": _codemod("trial"),
    "jax_dist/codemod/verify/recording/arrays.py": _codemod("recorded_values"),
    "jax_dist/codemod/verify/recording/bootstrap.py": _codemod("recording_starts"),
    "jax_dist/codemod/verify/recording/call_programs.py": _codemod("recorded_texts"),
    "jax_dist/codemod/verify/recording/flow.py": _codemod("flow_of_values"),
    "jax_dist/codemod/verify/recording/functions.py": _codemod("recorded_functions"),
    "jax_dist/codemod/verify/recording/guard.py": _codemod("guard"),
    "jax_dist/codemod/verify/recording/lost.py": _codemod("records"),
    "jax_dist/codemod/verify/recording/programs.py": _codemod("recorded_texts"),
    "jax_dist/codemod/verify/recording/recorder.py": _codemod("recorder"),
    "jax_dist/codemod/verify/recording/records.py": _codemod("records"),
    "jax_dist/codemod/verify/recording/start.py": _codemod("recording_starts", "recorder"),
}


# ---- which test runs which statement


class Coverage:
    """For each file of tests and each target: the statements that its tests run, and how long."""

    def __init__(self, jobs: "Jobs", targets: Iterable[str]) -> None:
        self._files = sorted(targets)
        self._tests = {file: self._test_files(file) for file in self._files}
        self._by_test_file: dict[str, Any] = {}
        self._imported: dict[str, set[str]] = {}  # the statements that run before any test
        wanted = sorted({test for file in self._files for test in self._tests[file]})
        for number, (test, known) in enumerate(jobs.map(self._known, wanted), 1):
            _progress(f"coverage: {number} of {len(wanted)} files of tests, {test}")
            self._by_test_file[test] = known["tests"]
            self._imported[test] = set(known["imported"])

    @staticmethod
    def _test_files(file: str) -> list[str]:
        patterns = next(TARGETS[each] for each in TARGETS if file in _matching(each))
        return list(dict.fromkeys(test for each in patterns for test in _matching(each)))

    def _known(self, job: Job, test: str) -> tuple[str, Any]:
        targets = {file: _digest(job.text(file)) for file in all_targets()}
        beside = sorted((job.folder / test).parent.glob("*.py"))
        helpers = [each.read_text() for each in beside if not each.name.startswith("test_")]
        kept = _KEPT / f"{test.replace('/', '.')}.json"
        key = _digest(_FORM, job.text(test), job.text("conftest.py"), *helpers)
        known = json.loads(kept.read_text()) if kept.exists() else {}
        wanted = {file: targets[file] for file in self._files if test in self._tests[file]}
        if known.get("key") == key and wanted.items() <= known["targets"].items():
            return test, known
        probed = {file: mutations.with_probes(file, job.text(file), SEEN) for file in targets}
        answer = job.run(probed, [test], {})
        if answer["code"] not in (0, 1, 5):  # 5: none of its tests is for this machine
            raise RuntimeError(f"{test} cannot be run as it is:\n{answer['said']}")
        tests = {name: value for name, value in answer["tests"].items() if value[1]}
        for name in answer["tests"].keys() - tests.keys():
            print(f"\n{name} fails without any mutant, and is left out", file=sys.stderr)
        _KEPT.mkdir(parents=True, exist_ok=True)
        known = {"key": key, "targets": targets, "tests": tests, "imported": answer["imported"]}
        kept.write_text(json.dumps(known))
        return test, known

    def of(self, mutant: Mutant) -> dict[str, float]:
        """The tests that run the statement of a mutant, and their seconds."""
        found, statement = {}, f"{mutant.file} {mutant.statement}"
        for file in self._tests[mutant.file]:
            anywhere = mutant.statement is None or statement in self._imported[file]
            for test, (seconds, _, statements) in self._by_test_file[file].items():
                if statement in statements or (
                    anywhere and any(each.startswith(mutant.file + " ") for each in statements)
                ):
                    found[test] = seconds
        return found

    def runs_in_tests_only(self, mutant: Mutant) -> bool:
        """Whether nothing of it runs while files are imported."""
        statement = f"{mutant.file} {mutant.statement}"
        files = self._tests[mutant.file]
        return mutant.statement is not None and not any(
            statement in self._imported[file] for file in files
        )

    def test_files(self, mutant: Mutant) -> list[str]:
        """Those with a test that runs something of the file of a mutant."""
        some = self.of(dataclasses.replace(mutant, statement=None))
        return sorted({test.partition("::")[0] for test in some})


def _matching(pattern: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


def all_targets() -> list[str]:
    """All files that are mutated."""
    return [file for pattern in TARGETS for file in _matching(pattern)]


def _mutants_of(file: str) -> list[Mutant]:
    return mutations.mutants_of(file, (ROOT / file).read_text(encoding="utf-8"))


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join([sys.version, *texts]).encode()).hexdigest()


# ---- all of it


class Jobs:
    """Several jobs, each with its copy, side by side."""

    def __init__(self, number: int, folder: str) -> None:
        folders = [pathlib.Path(folder, str(each)) for each in range(number)]
        self._jobs = [Job(each) for each in folders]
        self._free: queue.SimpleQueue[Job] = queue.SimpleQueue()
        for job in self._jobs:
            self._free.put(job)

    def map(self, function: Any, values: Iterable[Any]) -> Iterator[Any]:
        """What a function of a job and a value gives, as each ends."""

        def call(value: Any) -> Any:
            job = self._free.get()
            try:
                return function(job, value)
            finally:
                self._free.put(job)

        with concurrent.futures.ThreadPoolExecutor(len(self._jobs)) as pool:
            for future in concurrent.futures.as_completed(pool.submit(call, v) for v in values):
                yield future.result()

    def end(self) -> None:
        for job in self._jobs:
            job.end()


class Trial:
    """Runs the tests of mutants, those first that have caught others."""

    def __init__(self, coverage: Coverage, until: float, most: float) -> None:
        self._coverage, self._until, self._most = coverage, until, most
        self._caught: collections.Counter[str] = collections.Counter()  # by test

    def check(self, job: Job, mutant: Mutant) -> None:
        """Raises where tests fail without the mistake, too: nothing would be caught then."""
        seconds = self._coverage.of(dataclasses.replace(mutant, statement=None))
        quickest = sorted(seconds, key=lambda test: seconds[test])[:5]
        files = sorted({test.partition("::")[0] for test in quickest})
        answer = job.run({mutant.file: mutant.before}, files, {each: 9.0 for each in quickest})
        if quickest and answer["code"]:
            raise RuntimeError(f"{quickest} fail without a mutant:\n{answer['said']}")

    def of(self, job: Job, mutant: Mutant) -> tuple[Mutant, str]:
        """A mutant, and what became of it: "" where it survived."""
        if time.monotonic() > self._until:
            return mutant, "not tried"
        seconds = self._coverage.of(mutant)
        spent, wanted = 0.0, {}
        for test in sorted(seconds, key=lambda test: (-self._caught[test], seconds[test])):
            if spent < self._most:
                spent += seconds[test]
                wanted[test] = seconds[test]
        by = self._warm(job, mutant, wanted) or self._fresh(job, mutant, wanted)
        self._caught[by] += 1
        return mutant, by

    def _warm(self, job: Job, mutant: Mutant, wanted: dict[str, float]) -> str | None:
        if not wanted or not self._coverage.runs_in_tests_only(mutant):
            return None
        return job.run_warm(mutant.file, mutant.text, self._coverage.test_files(mutant), wanted)

    def _fresh(self, job: Job, mutant: Mutant, wanted: dict[str, float]) -> str:
        order = list(dict.fromkeys(test.partition("::")[0] for test in wanted))
        for batch in (order[:1], order[1:3], order[3:]):
            some = {test: wanted[test] for test in wanted if test.partition("::")[0] in batch}
            answer = job.run({mutant.file: mutant.text}, batch, some) if some else {"code": 0}
            if answer["code"] not in (0, 5):  # 5: its tests are gone
                failed = [test for test, note in answer["tests"].items() if not note[1]]
                return failed[-1] if failed else f"ended with {answer['code']}"
        return ""


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text[:110]}", end="", file=sys.stderr, flush=True)


def _chosen(options: argparse.Namespace, whole: Sequence[str]) -> list[Mutant]:
    files, lines = all_targets(), range(1, sys.maxsize)
    if options.sample and not options.only:
        files = [file for file in files if file in whole]
    if options.only:
        name, _, numbers = options.only.partition(":")
        files = [file for file in files if file.startswith(name)]
        if numbers:
            first, _, last = numbers.partition("-")
            lines = range(int(first), int(last or first) + 1)
    if not files:
        raise SystemExit(f"{options.only} is none of the targets: {', '.join(all_targets())}")
    found = [each for file in files for each in _mutants_of(file) if each.line in lines]
    if options.again:
        before = json.loads(options.again.read_text())
        survivors = {(each["file"], each["mutant"]) for each in before if not each["by"]}
        found = [each for each in found if (each.file, each.name) in survivors]
    if options.sample and found:
        chance = random.Random(options.seed)
        file = chance.choice(found).file  # of one, for its tests are run once to know what they run
        within = [each for each in found if each.file == file]
        found = chance.sample(within, min(options.sample, len(within)))
    return found


def _is_listed(mutant: Mutant, reasons: Mapping[str, Iterable[str]]) -> bool:
    return any(
        mutant.name == name or (name.endswith(" -> *") and mutant.name.startswith(name[:-1]))
        for name in reasons.get(mutant.file, ())
    )


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--only", metavar="FILE[:LINES]", help="mutants of it, or of a folder")
    parser.add_argument("--sample", type=int, metavar="N", help="of one file, N mutants by chance")
    parser.add_argument("--seed", default="0", help="by which they are drawn; any text")
    parser.add_argument("--seconds", type=float, metavar="S", help="none is tried after that")
    most = {"type": float, "default": _MOST_SECONDS, "metavar": "S"}
    parser.add_argument("--most", **most, help="seconds of tests for one mutant (default: 5)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="at a time (default: 2)")
    parser.add_argument("--list", action="store_true", help="print them, and run nothing")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="what became of each")
    parser.add_argument("--again", type=pathlib.Path, metavar="FILE", help="what survived in it")
    options = parser.parse_args()
    reasons = tomllib.loads(_WITHOUT_EFFECT.read_text())
    mutants = _chosen(options, reasons.pop("whole"))
    if options.list:
        for each in mutants:
            print(f"{each.file}:{each.line} {each.name}")
        return 0
    start = time.monotonic()
    tried = [each for each in mutants if not _is_listed(each, reasons)]
    table: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    became: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        jobs = Jobs(options.jobs, folder)
        coverage = Coverage(jobs, {each.file for each in tried})
        trial = Trial(coverage, time.monotonic() + (options.seconds or 1e9), options.most)
        for _ in jobs.map(trial.check, {each.file: each for each in tried}.values()):
            pass
        for number, (each, by) in enumerate(jobs.map(trial.of, tried), 1):
            kind = {"": "survived", "not tried": "not tried"}.get(by, "caught")
            table[each.file][kind] += 1
            became.append({"file": each.file, "line": each.line, "mutant": each.name, "by": by})
            if options.json:
                options.json.write_text(json.dumps(became, indent=1) + "\n")
            if not by:
                tests = len(coverage.of(each)) or "no test runs it:"
                print(f"{each.file}:{each.line} {each.name}  [{tests}]", flush=True)
            _progress(f"{number} of {len(tried)}, {time.monotonic() - start:.0f} s")
        jobs.end()
    for each in mutants:
        table[each.file]["no effect"] += _is_listed(each, reasons)
    kinds = ("caught", "survived", "no effect", "not tried")
    print(f"\n| file | {' | '.join(kinds)} | caught |\n|---|---|---|---|---|---|")
    for file, counts in table.items():
        share = 100 * counts["caught"] / ((counts["caught"] + counts["survived"]) or 1)
        print(f"| {file} | {' | '.join(str(counts[each]) for each in kinds)} | {share:.0f} % |")
    gone = [
        f"{file}: {name}"
        for file, listed in reasons.items()
        for name in listed
        if not any(_is_listed(each, {file: {name: ""}}) for each in _mutants_of(file))
    ]
    for each in gone:
        print(f"mutants.toml lists what is no more, {each}")
    return int(bool(gone) or any(counts["survived"] for counts in table.values()))


if __name__ == "__main__":
    sys.exit(main())
