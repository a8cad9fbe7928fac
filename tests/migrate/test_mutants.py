"""Drawn mutants of migrated programs: all that compute something else are called different."""

import ast
import copy
import json
import pathlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import test_golden as golden

from jax_dist.migrate.places import FileMigration
from jax_dist.migrate.verify import comparison, runs, trial

_COUNT = 60
# Each program runs in a process of its own, and prints one line. The first mapped call is there so
# that each process has one.
_DRIVER = """\
import contextlib, importlib, json, os, sys
import flax.jax_utils, jax, numpy as np

for name in sys.argv[1:]:
    if not (child := os.fork()):
        jax.pmap(lambda x: x)(np.arange(8))
        try:
            with contextlib.redirect_stdout(sys.stderr):  # jax 0.12 prints where some errors are
                leaves = jax.tree.leaves(importlib.import_module(name).result())
            print(json.dumps([np.asarray(leaf).tolist() for leaf in leaves]), flush=True)
        except Exception:
            print("raised", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
_OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
_NAMES = {"pmean": "psum", "psum": "pmean", "mean": "sum", "sum": "mean"}


def _mutants(text: str) -> Iterator[str]:
    """Yield texts with one operator, number, function or spec changed."""
    tree = ast.parse(text)
    for number, node in enumerate(ast.walk(tree)):
        other = copy.deepcopy(tree)
        at: Any = [*ast.walk(other)][number]
        match node:
            case ast.BinOp(op=op) if type(op) in _OPERATORS:
                at.op = _OPERATORS[type(op)]()
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                at.value = value + 1
            case ast.Attribute(attr=name) if name in _NAMES:
                at.attr = _NAMES[name]
            case ast.Call(func=ast.Name(id="P"), args=[_]):
                at.args = []
            case _:
                continue
        yield ast.unparse(ast.fix_missing_locations(other))


def _run(folder: pathlib.Path, texts: list[str], **options: Any) -> list[runs.Run]:
    """Return the run of each text, as if it were alone."""
    names = [f"m{number}" for number in range(len(texts))]
    encoded = {f"{name}.py": text.encode() for name, text in zip(names, texts, strict=True)}
    command = [sys.executable, "driver.py", *names]
    run = runs.run_recorded(command, str(folder), encoded, devices=8, **options)
    assert run.exit_code == 0, run.errors
    lines = run.output.splitlines()
    return [
        runs.Run(0, line, "", 1.0, [calls]) for line, calls in zip(lines, run.calls, strict=True)
    ]


def _is_close(old: Any, new: Any, bound: float) -> bool:
    if isinstance(old, list) or isinstance(new, list):
        if not (isinstance(old, list) and isinstance(new, list)):
            return False
        return len(old) == len(new) and all(map(_is_close, old, new, [bound] * len(old)))
    return old == new or (old != old and new != new) or abs(old - new) <= bound * max(1, abs(old))


def _computes_the_same(old: runs.Run, new: runs.Run, bound: float) -> bool:
    if not new.output.startswith("["):
        return False
    return _is_close(json.loads(old.output), json.loads(new.output), bound)


@pytest.mark.thorough
def test_all_mutants_that_compute_something_else_are_different(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("flax")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "driver.py").write_text(_DRIVER)
    monkeypatch.chdir(tmp_path / "tree")
    programs = [name for name, to in golden.CASES if to == "jit"]
    befores = [golden.read(name) for name in programs]
    drawn = [
        (number, to, mutant)
        for number, name in enumerate(programs)
        for to in ("shard_map", "jit")
        for mutant in _mutants(golden.read(name, f"after_{to}"))
    ]
    drawn = random.Random(0).sample(drawn, _COUNT)
    olds = _run(tmp_path / "tree", befores, work=tmp_path / "before")
    folders = sorted((tmp_path / "before" / "records").iterdir())
    (tmp_path / "replayed").mkdir()
    for position, (number, _, _) in enumerate(drawn):
        (tmp_path / "replayed" / f"00000-{position:05}").symlink_to(folders[number])
    written = {
        f"m{position}.py": trial.written_lines(
            FileMigration("a.py", befores[number].encode(), mutant.encode())
        )
        for position, (number, _, mutant) in enumerate(drawn)
    }
    news = _run(
        tmp_path / "tree",
        [mutant for _, _, mutant in drawn],
        work=tmp_path / "after",
        written_lines=written,
        old_folder=str(tmp_path / "replayed"),
    )

    missed, different = [], 0
    for (number, to, mutant), new in zip(drawn, news, strict=True):
        old = olds[number]
        file = golden.migrate(befores[number], to)
        places = [(f"m{number}.py", place.line) for place in file.places if place.is_mapped]
        may_round = any(place.form == "jit" for place in file.places)
        verification = comparison.compare([], old, new, places, may_round=may_round)
        if not _computes_the_same(old, new, 1e-4 if to == "jit" else 0):
            different += 1
            if not verification.has_differences:
                missed.append((programs[number], to, mutant))
    assert different >= _COUNT // 2
    assert missed == []
