"""Runs chosen tests with another text of one file, for `benchmarks/mutants.py`.

A job is a copy of the tree, so that the tree itself never changes. It runs tests in two ways:

- fresh: it forks a process that has imported jax, but nothing of jax_dist, and every test is
  collected anew. A second or two before the first test, and all of XLA's work again.
- warm: a process that has collected the tests once takes over the functions of the text, runs
  some tests, and takes the functions back. Tables and caches of jax_dist are put back too. What
  runs while a file is imported cannot be tried so.
"""

import collections
import contextlib
import gc
import importlib
import itertools
import json
import os
import pathlib
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
SEEN = "JAX_DIST_SEEN"  # the variable that names the file where statements are written down
_IMPORTED = ("numpy", "jax", "jax.numpy", "jax.experimental.multihost_utils", "pytest")
_MOST_RUNS = 300  # of a warm process: it keeps what was compiled
_MOST_MEMORY = 6 * 2**30  # bytes, of data: a loop without an end may fill a list
_ENDLESS = "does not end"


class Job:
    """A copy of the tree, and the processes that run tests in it."""

    def __init__(self, folder: pathlib.Path) -> None:
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout
        self.folder, self._changes = folder, 0
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        self._fresh = self._start("--fresh")
        self._warm: _Warm | None = None

    def _start(self, *words: str) -> subprocess.Popen[str]:
        known = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(self.folder)}
        return subprocess.Popen(
            [sys.executable, __file__, *words],
            **{"cwd": self.folder, "env": os.environ | known, "text": True},
            **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE},
        )

    def run(self, texts: dict[str, str], files: Sequence[str], wanted: dict[str, float]) -> Any:
        """How tests end with other texts of some files: an exit code, and a note for each test."""
        with self._changed(texts):
            print(json.dumps([files, wanted]), file=self._fresh.stdin, flush=True)
            return json.loads(self._fresh.stdout.readline())

    def run_warm(
        self, file: str, text: str, files: Sequence[str], wanted: dict[str, float]
    ) -> str | None:
        """The first of the wanted tests that fails with another text of one file.

        "": none; None: the text cannot be tried so, or the test has failed for something else.
        """
        if self._warm is None or not self._warm.serves(file, files):
            self._end_warm()
            self._warm = _Warm(self._start("--warm", file, *files), file, files)
            self._warm.ask("", {})  # all is imported then, and from the right text
        with self._changed({file: text}):
            failed = self._warm.ask(text, wanted)
        if failed == _ENDLESS:
            self._end_warm()
        elif failed and self._warm.ask("", {failed: wanted[failed]}) != "":
            self._end_warm()
            return None
        return failed

    def text(self, file: str) -> str:
        return (self.folder / file).read_text(encoding="utf-8")

    @contextlib.contextmanager
    def _changed(self, texts: dict[str, str]) -> Iterator[None]:
        before = {file: self.text(file) for file in texts}
        for file, text in texts.items():
            self._write(file, text)
        try:
            yield
        finally:
            for file, text in before.items():
                self._write(file, text)

    def _write(self, file: str, text: str) -> None:
        """With a time that no text had before, by which Python tells that bytecode is old."""
        self._changes += 1
        (self.folder / file).write_text(text, encoding="utf-8")
        os.utime(self.folder / file, (self._changes, self._changes))

    def _end_warm(self) -> None:
        if self._warm is not None:
            self._warm.end()
        self._warm = None

    def end(self) -> None:
        self._end_warm()
        self._fresh.stdin.close()
        self._fresh.wait()


class _Warm:
    """A warm process, seen from outside."""

    def __init__(self, process: subprocess.Popen[str], file: str, files: Sequence[str]) -> None:
        self._process, self._for, self._runs = process, (file, tuple(files)), 0

    def serves(self, file: str, files: Sequence[str]) -> bool:
        return self._for == (file, tuple(files)) and self._runs < _MOST_RUNS

    def ask(self, text: str, wanted: dict[str, float]) -> str | None:
        self._runs += 1
        try:
            print(json.dumps([text, wanted]), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            return None
        until = 120 + sum(map(_limit, wanted.values()))
        if not select.select([self._process.stdout], [], [], until)[0]:
            return _ENDLESS
        line = self._process.stdout.readline()
        return json.loads(line) if line else None  # it has died

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()


# ---- fresh processes


def _serve_fresh() -> None:
    for name in _IMPORTED:
        __import__(name)
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as folder:
            child = os.fork()
            if not child:
                try:
                    _run_fresh(*json.loads(line), pathlib.Path(folder))
                finally:
                    os._exit(70)
            _, status = os.waitpid(child, 0)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # what the tests have started
            said = pathlib.Path(folder, "output").read_text(errors="replace")[-2000:]
            answer = {"code": os.waitstatus_to_exitcode(status), "tests": {}, "said": said}
            answer["imported"] = _seen(folder, 0)
            notes = pathlib.Path(folder, "notes")
            for note in notes.read_text().splitlines() if notes.exists() else []:
                test, number, seconds, outcome = json.loads(note)
                answer["tests"][test] = [seconds, outcome, _seen(folder, number)]
        print(json.dumps(answer), flush=True)


def _seen(folder: str, number: int) -> list[str]:
    """The statements that one test has run; 0: all that ran before the first of them."""
    path = pathlib.Path(folder, f"seen{number}")
    return path.read_text().splitlines() if path.exists() else []


def _run_fresh(files: list[str], wanted: dict[str, float], folder: pathlib.Path) -> None:
    import pytest

    _apart(folder)
    os.environ[SEEN] = str(folder / "seen0")
    options = [*_OPTIONS, "-x"] if wanted else _OPTIONS
    os._exit(int(pytest.main([*options, *files], plugins=[_Chosen(wanted, folder)])))


_OPTIONS = ["-q", "-p", "no:cacheprovider", "-n0", "--tb=native"]


def _apart(folder: pathlib.Path) -> None:
    """In a group of its own, with its own folder, little memory, and silent."""
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_MEMORY, resource.RLIM_INFINITY))
    with contextlib.suppress(PermissionError):
        os.setsid()
    output = os.open(folder / "output", os.O_RDWR | os.O_CREAT)
    for number in (0, 1, 2):
        os.dup2(output, number)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)


def _limit(seconds: float) -> float:
    """After which a test that took so many does not end; on a busy machine, more."""
    return (10 + 5 * seconds) * max(1, os.getloadavg()[0] / (os.cpu_count() or 1))


def _only_once(items: list) -> None:
    """No test is tried again."""
    for item in items:
        item.own_markers[:] = [each for each in item.own_markers if each.name != "flaky"]


class _Chosen:
    """Runs the tests that are wanted, in that order, and notes how each ends."""

    def __init__(self, wanted: dict[str, float], folder: pathlib.Path) -> None:
        self._wanted = wanted  # to seconds; empty: all
        self._folder, self._number, self._failed = folder, 0, False

    def pytest_collection_modifyitems(self, items: list) -> None:
        _only_once(items)
        if self._wanted:
            order = {name: place for place, name in enumerate(self._wanted)}
            items[:] = [item for item in items if item.nodeid in order]
            items.sort(key=lambda item: order[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._number, self._failed, self._start = self._number + 1, False, time.monotonic()
        os.environ[SEEN] = str(self._folder / f"seen{self._number}")
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, _limit(self._wanted.get(nodeid, 60)))

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._failed |= report.failed

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        seconds = round(time.monotonic() - self._start, 3)
        note = json.dumps([nodeid, self._number, seconds, not self._failed])
        with open(self._folder / "notes", "a") as notes:
            notes.write(note + "\n")


# ---- warm processes


def _serve_warm(file: str, files: list[str]) -> None:
    import pytest

    requests, answers = os.fdopen(os.dup(0)), os.dup(1)
    with tempfile.TemporaryDirectory() as folder:
        _apart(pathlib.Path(folder))
        pytest.main([*_OPTIONS, *files], plugins=[_Asked(file, requests, answers)])
    os._exit(0)


class _LateError(BaseException):
    """A test that takes far too long."""


class _Asked:
    """Waits for requests once the tests are collected."""

    def __init__(self, file: str, requests: Any, answers: int) -> None:
        self._file, self._requests, self._answers = file, requests, answers
        self._failed = False

    def pytest_collection_modifyitems(self, items: list) -> None:
        _only_once(items)

    def pytest_runtestloop(self, session: Any) -> bool:
        importlib.import_module(self._file.removesuffix(".py").replace("/", "."))
        functions = _Functions(self._file)
        items = {item.nodeid: item for item in session.items}
        for line in self._requests:
            text, wanted = json.loads(line)
            failed = None
            with _tables_put_back():
                if not text or functions.take_over(text):
                    failed = self._first_failure(session, items, wanted)
                functions.put_back()
            os.write(self._answers, (json.dumps(failed) + "\n").encode())
        return True

    def _first_failure(self, session: Any, items: Any, wanted: dict[str, float]) -> str:
        chosen = [items[name] for name in wanted if name in items]
        failed = ""
        for item, following in itertools.zip_longest(chosen, chosen[1:]):
            self._failed = False
            signal.signal(signal.SIGALRM, _raise_late)
            signal.setitimer(signal.ITIMER_REAL, _limit(wanted[item.nodeid]))
            try:
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            if self._failed:
                failed = item.nodeid
                break
        session._setupstate.teardown_exact(None)  # fixtures of modules may hold what is wrong
        return failed

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._failed |= report.failed


def _raise_late(*_: Any) -> None:
    raise _LateError


class _Functions:
    """The living functions of a file, which can take over the code of another text."""

    def __init__(self, file: str) -> None:
        modules = [str(getattr(each, "__file__", None)) for each in [*sys.modules.values()]]
        self._path = next(path for path in modules if path.endswith("/" + file))
        self._known = self._codes(pathlib.Path(self._path))
        names = {_told_apart(code): name for name, code in self._known.items()}
        gc.unfreeze()  # else they are not among the objects
        self._living = [
            (each, each.__code__, names[_told_apart(each.__code__)])
            for each in gc.get_objects()
            if type(each) is types.FunctionType and each.__code__.co_filename == self._path
        ]

    def _codes(self, text: str | pathlib.Path) -> dict[Any, types.CodeType]:
        """All code of a text, by qualified name, and by place among those of one name."""
        found: dict[Any, types.CodeType] = {}
        times: collections.Counter[str] = collections.Counter()

        def walk(code: types.CodeType) -> None:
            for each in code.co_consts:
                if isinstance(each, types.CodeType):
                    found[each.co_qualname, times[each.co_qualname]] = each
                    times[each.co_qualname] += 1
                    walk(each)

        source = text if isinstance(text, str) else text.read_text(encoding="utf-8")
        walk(compile(source, self._path, "exec", dont_inherit=True))
        return found

    def take_over(self, text: str) -> bool:
        """Whether all could take over the code of a text."""
        new = self._codes(text)
        try:
            for function, _, (name, place) in self._living:
                if (name, place + 1) in new and (name, place + 1) not in self._known:
                    return False  # another of that name: which is which?
                function.__code__ = new[name, place]
        except (KeyError, ValueError):  # it is gone, or closes over something else
            return False
        return True

    def put_back(self) -> None:
        for function, code, _ in self._living:
            function.__code__ = code


def _told_apart(code: types.CodeType) -> tuple[Any, ...]:
    """Code that has run is not equal to itself as compiled."""
    return code.co_qualname, code.co_firstlineno, code.co_code


@contextlib.contextmanager
def _tables_put_back() -> Iterator[None]:
    """The dicts, lists and sets of the modules of jax_dist as they were, and its caches empty."""
    globals_ = [
        (name, value)
        for module, holder in [*sys.modules.items()]
        if module.partition(".")[0] == "jax_dist" and holder is not None
        for name, value in [*vars(holder).items()]
    ]
    before = [
        (value, type(value)(value))
        for name, value in globals_
        if type(value) in (dict, list, set) and not name.startswith("__")
    ]
    cached = [value for _, value in globals_ if hasattr(value, "cache_clear")]
    for each in cached:
        each.cache_clear()
    try:
        yield
    finally:
        for value, copy in before:
            value.clear()
            value.extend(copy) if isinstance(value, list) else value.update(copy)
        for each in cached:
            each.cache_clear()


if __name__ == "__main__":
    sys.path.remove(str(pathlib.Path(__file__).parent))  # tests have modules of the same names
    if sys.argv[1] == "--fresh":
        _serve_fresh()
    else:
        _serve_warm(sys.argv[2], sys.argv[3:])
