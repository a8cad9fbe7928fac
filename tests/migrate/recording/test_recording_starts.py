"""How the recording starts in the process of a program, and what marked programs call."""

import importlib
import importlib.machinery
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from jax_dist.migrate.verify.recording import bootstrap, guard, lost, recorder, start
from jax_dist.migrate.verify.recording.flow import NAME

# --- in a process of its own, which imports no jax

_PACKAGE = pathlib.Path(start.__file__).parent


def _run(folder: pathlib.Path, program: str, *paths: str, **wanted: Any) -> dict[str, Any]:
    """What a program prints that starts as one that is recorded."""
    first, records = folder / "first", folder / "records"
    for each in (first, records):
        each.mkdir(exist_ok=True)
    shutil.copy(bootstrap.__file__, first / "sitecustomize.py")
    told = {"package": str(_PACKAGE), "folder": str(records), "files": [], **wanted}
    (first / "settings.json").write_text(json.dumps(told))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(first), *paths])}
    command = [sys.executable, "-c", f"import json, sys\nfound = {{}}\n{program}"]
    command[-1] += "\nprint(json.dumps(found))"
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_program_starts_with_seeds_and_hooks(tmp_path: pathlib.Path):
    found = _run(
        tmp_path,
        "import random, numpy.random\n"
        "found['random'] = random.random()\n"
        "found['numpy'] = numpy.random.random()\n"
        "found['package'] = '_jax_dist_recording.start' in sys.modules\n"
        "found['jax'] = 'jax' in sys.modules\n"
        "import _jax_dist_recording.start as s\n"
        "s.ran(3), s.ran(3), s.place(4, 1)\n"
        "found['host'] = s.host(5, lambda v: v * 2, 4)\n"
        f"import builtins; found['watched'] = hasattr(builtins, {NAME!r})\n",
    )

    random_ = random.Random(0).random()
    assert found["random"] == random_
    assert found["numpy"] == np.random.RandomState(0).random_sample()
    assert (found["package"], found["jax"], found["watched"]) == (True, False, False)
    assert found["host"] == 8
    (places,) = (tmp_path / "records").glob("places-*.txt")
    assert places.read_text() == "3\n4\n4 alone\n"


def test_the_sitecustomize_that_we_hide_runs(tmp_path: pathlib.Path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text("import sys\nsys.theirs = __name__\n")
    program = "found['theirs'] = getattr(sys, 'theirs', None)\n"
    program += "found['module'] = sys.modules['sitecustomize'].__file__\n"

    found = _run(tmp_path, program, str(theirs))
    assert found == {"theirs": "sitecustomize", "module": str(theirs / "sitecustomize.py")}
    assert _run(tmp_path, program)["theirs"] is None
    folder = tmp_path / "no module" / "sitecustomize"
    folder.mkdir(parents=True)
    program = "found['started'] = '_jax_dist_recording.start' in sys.modules\n"
    assert _run(tmp_path, program, str(folder.parent)) == {"started": True}


def test_the_file_by_its_own_name_starts_nothing():
    assert bootstrap.__name__ != "sitecustomize"
    assert "_jax_dist_recording" not in sys.modules


def test_a_python_that_leaves_our_path_aside_starts_late(tmp_path: pathlib.Path):
    """Once, and with the entry points that it has imported by then."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.theirs = True\n")
    (tmp_path / "child.py").write_text(
        "import json, random, runpy, sys, types\n"
        "import jax\n"
        "sys.path.insert(0, '')\n"
        "sys.modules['jax_dist.pmap'] = ours = types.ModuleType('ours')\n"
        "ours.pmap = real = lambda fun: fun\n"
        "found = []\n"
        "for _ in range(2):\n"
        f"    runpy.run_path('first/sitecustomize.py', run_name={bootstrap.LATE!r})\n"
        "    found.append(random.random())\n"
        "import _jax_dist_recording.start as s\n"
        "s.ran(3)\n"
        "print(json.dumps([found, ours.pmap is real, hasattr(sys, 'theirs')]))\n"
    )
    program = (
        "import subprocess\n"
        "child = [sys.executable, '-I', 'child.py']\n"
        "done = subprocess.run(child, capture_output=True, text=True)\n"
        "found['said'], found['failed'] = done.stdout, done.stderr\n"
    )

    told = _run(tmp_path, program)
    numbers = random.Random(0)
    assert told["failed"] == ""
    assert json.loads(told["said"]) == [[numbers.random(), numbers.random()], False, False]
    (places,) = (tmp_path / "records").glob("places-*.txt")
    assert places.read_text() == "3\n"


def test_what_is_imported_before_an_early_start_is_left(tmp_path: pathlib.Path):
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "sitecustomize.py").write_text(
        "import sys, types\n"
        "import jax\n"
        "sys.modules['jax_dist.pmap'] = sys.ours = types.ModuleType('ours')\n"
        "sys.ours.pmap = sys.real = lambda fun: fun\n"
    )

    program = "found['is_theirs'] = sys.ours.pmap is sys.real\n"
    assert _run(tmp_path, program, str(tmp_path / "before")) == {"is_theirs": True}


def test_a_program_that_may_write_to_its_folders_alone(tmp_path: pathlib.Path):
    program = """
try:
    open('a', 'w')
except PermissionError as error:
    found['said'] = str(error)
"""

    assert "--scratch" in _run(tmp_path, program, writable=[str(tmp_path / "records")])["said"]
    assert _run(tmp_path, program) == {}


def test_a_program_whose_expressions_tell_their_values(tmp_path: pathlib.Path):
    found = _run(tmp_path, f"found['value'] = {NAME}(3, 4)", watched=True)

    assert found == {"value": 4}


# --- in this process


@pytest.fixture
def started(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Starts it, and ends it again."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for name, value in (("_folder", ""), ("_told", set()), ("_wanted", None), ("_recorder", None)):
        monkeypatch.setattr(start, name, value)
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 - as programs do

    def begin(**wanted: Any) -> None:
        start.start(folder=str(tmp_path), files=[], **wanted)

    yield begin  # pyright: ignore[reportReturnType]
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002 - as programs do


def _finders() -> list[Any]:
    return [each for each in sys.meta_path if isinstance(each, start._Finder)]


def test_what_is_loaded_already_is_seeded_at_once(started: Callable):
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002 - as programs do
    started()

    assert random.random() == random.Random(0).random()
    assert np.random.random() == np.random.RandomState(0).random_sample()  # noqa: NPY002 - as programs do
    assert len(_finders()) == 1
    assert sys.meta_path[0] is _finders()[0]


def test_numpy_is_seeded_when_it_is_loaded_and_not_when_it_is_loaded_again(
    started: Callable, monkeypatch: pytest.MonkeyPatch
):
    loaded = sys.modules["numpy.random"]
    assert start._seeding("numpy.random") is None
    assert start._seeding("numpy") is None
    monkeypatch.delitem(sys.modules, "numpy.random")
    started()
    assert sys.meta_path[:2] == _finders()
    action = start._seeding("numpy.random")
    assert action is not None
    np.random.seed(5)  # noqa: NPY002 - as programs do
    action(loaded)
    assert np.random.random() == np.random.RandomState(0).random_sample()  # noqa: NPY002 - as programs do
    assert start._seeding("random") is None


def test_the_options_of_a_start(
    started: Callable, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    given: list[Any] = []
    monkeypatch.setattr(guard, "install", lambda *args: given.append(args))
    monkeypatch.setattr(start.Flow, "install", lambda _: given.append("flow"))
    started()
    assert given == []
    assert start._wanted == {"folder": str(tmp_path), "files": []}
    started(writable=["a"])
    assert given == [(str(tmp_path), ["a"])]
    started(watched=True)
    assert given[1:] == ["flow"]
    assert start._wanted is not None
    assert isinstance(start._wanted["flow"], start.Flow)


def _module(folder: pathlib.Path, name: str, text: str) -> types.ModuleType:
    """Imports a module of a folder."""
    (folder / f"{name}.py").write_text(text)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
        del sys.modules[name]


class _Recorder:
    """Stands in for the recorder."""

    def __init__(self, **wanted: Any):
        self.wanted, self.hooks = wanted, []

    def hooked(self, module: str, name: str, real: Callable) -> Callable:
        self.hooks.append((module, name, real))
        made = lambda *args: real(*args)
        made._recorded_make = True  # pyright: ignore[reportFunctionMemberAccess]
        return made

    def placed(self, place: int, value: Any) -> Any:
        return None if value == "alone" else f"{value} of {place}"

    def host(self, number: int, function: Callable, value: Any) -> Any:
        return number, function(value)


def test_names_are_hooked_when_their_module_is_loaded(
    started: Callable, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(recorder, "CallRecorder", _Recorder)
    started()
    for name in ("_mapped_devices", "_mapped_over_devices"):
        found = _module(tmp_path, name, "def mapped(x):\n    return x * 2\nother = mapped\n")
        assert found.mapped(3) == 6
        assert found.mapped is not found.other
    hooks = start._recorder.hooks
    assert [(module, name) for module, name, _ in hooks] == [
        *(("_mapped_devices", "mapped"), ("_mapped_over_devices", "mapped"))
    ]
    assert start._recorder.wanted == {"folder": str(tmp_path), "files": []}
    nothing = _module(tmp_path, "_mapped_over", "def other(x):\n    return x\n")
    plain = _module(tmp_path, "plain", "def mapped(x):\n    return x\n")
    assert nothing.other(1) == plain.mapped(1) == 1
    assert len(hooks) == 2


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("jax", ["pmap", "shard_map", "jit"]),
        ("jax.experimental.shard_map", ["shard_map"]),
        ("jax_dist.pmap", ["pmap"]),
        ("jax_dist.global_view.view", ["global_view"]),
        ("a.b._mapped_over", ["mapped"]),
        ("a._mapped_devices", ["mapped"]),
        ("a_mapped", []),
        ("_mapped_more", []),
        ("jax.numpy", []),
    ],
)
def test_what_is_hooked_in_which_module(
    started: Callable, monkeypatch: pytest.MonkeyPatch, module: str, names: list[str]
):
    monkeypatch.setattr(recorder, "CallRecorder", _Recorder)
    started()
    loaded = types.ModuleType(module)
    every = ("pmap", "shard_map", "jit", "global_view", "mapped")
    vars(loaded).update(dict.fromkeys(every, len))
    action = start._hooking(module)
    if action is not None:
        action(loaded)

    assert [name for name in every if vars(loaded)[name] is not len] == names
    if names:
        assert [hook[:2] for hook in start._recorder.hooks] == [(module, name) for name in names]
        action(loaded)  # pyright: ignore[reportOptionalCall]
        assert len(start._recorder.hooks) == len(names)


def test_a_name_that_a_module_makes_when_asked_is_hooked(
    started: Callable, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(recorder, "CallRecorder", _Recorder)
    started()
    loaded = types.ModuleType("jax.experimental.shard_map")
    loaded.__getattr__ = {"shard_map": len}.__getitem__  # pyright: ignore
    action = start._hooking("jax.experimental.shard_map")
    assert action is not None
    action(loaded)

    assert loaded.shard_map([1]) == 1
    assert "shard_map" in vars(loaded)


def test_a_finder_lets_the_others_find(started: Callable, monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []
    actions: list[Any] = []
    finder = start._Finder(lambda name: actions.append if name == "wanted" else None)
    loader = types.SimpleNamespace(exec_module=lambda module: asked.append(("ran", module)))
    spec = importlib.machinery.ModuleSpec("wanted", loader)  # pyright: ignore
    bare = importlib.machinery.ModuleSpec("wanted", None)

    def finding(found: Any) -> Any:
        def find_spec(*args: Any) -> Any:
            asked.append(args)
            return found

        return types.SimpleNamespace(find_spec=find_spec)

    monkeypatch.setattr(sys, "meta_path", [finder, object(), finding(None), finding(bare)])
    assert finder.find_spec("other", None) is None
    assert asked == []
    assert finder.find_spec("wanted", ["a"], "b") is None
    assert asked == [("wanted", ["a"], "b")] * 2
    monkeypatch.setattr(sys, "meta_path", [finding(spec), finding(bare), finder])
    assert finder.find_spec("wanted", None) is spec
    assert len(asked) == 3
    loader.exec_module(7)
    assert (asked[-1], actions) == (("ran", 7), [7])


def test_a_helper_is_recorded_where_it_says_so(started: Callable, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recorder, "CallRecorder", _Recorder)
    names: dict[str, Any] = {"mapped": len, "__name__": "a"}
    start.record_helper(names)
    assert names["mapped"] is len  # nothing is recorded here
    started()
    start.record_helper(names)
    assert names["mapped"]([1]) == 1
    assert start._recorder.hooks == [("a", "mapped", len)]


def test_hooking_twice_makes_one_recorder(started: Callable, tmp_path: pathlib.Path):
    started()
    names: dict[str, Any] = {"mapped": lambda fun: jax.pmap(fun), "__name__": "a"}
    start._hook(names, "mapped", names["mapped"], "a")
    first = start._recorder
    start._hook(names, "mapped", len, "a")

    assert start._recorder is first
    assert len(list(tmp_path.glob("process-*"))) == 1


# --- what marked programs call


def test_places_are_told_once(started: Callable, tmp_path: pathlib.Path):
    started()
    assert start.ran(3) is None
    assert start.place(4, "value") == "value"
    start._recorder = _Recorder()
    assert start.place(4, "value") == "value of 4"
    assert start.place(5, "value") == "value of 5"
    assert start.place(6, "alone") == "alone"
    threads = [threading.Thread(target=start.ran, args=(7,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    path = tmp_path / f"places-{os.getpid()}.txt"
    assert path.read_text() == "3\n4\n4 alone\n5\n6\n6 alone\n7\n"


def test_a_place_that_cannot_be_told_is_lost(
    started: Callable, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    started()
    monkeypatch.setattr(start, "_folder", str(tmp_path / "gone"))
    assert (tmp_path / lost.NAME).read_bytes() == b"\0"
    start.ran(3)

    assert (tmp_path / lost.NAME).read_bytes() == b"\1"


@pytest.mark.parametrize("forks", [True, False])
def test_a_fork_waits_for_no_thread_of_its_parent(
    started: Callable, monkeypatch: pytest.MonkeyPatch, *, forks: bool
):
    hooks: list[Callable] = []
    monkeypatch.setattr(start, "_lock", lock := start._lock)
    if forks:
        register = lambda *, after_in_child: hooks.append(after_in_child)
        monkeypatch.setattr(os, "register_at_fork", register)
    else:
        monkeypatch.delattr(os, "register_at_fork")
    started()
    assert start._lock is lock
    for each in hooks:
        each()

    assert (start._lock is not lock) is forks


def test_the_value_of_a_host_edit(started: Callable):
    started()
    assert start.host(3, lambda v: v * 2, 4) == 8
    start._recorder = _Recorder()
    assert start.host(3, lambda v: v * 2, 4) == (3, 8)
