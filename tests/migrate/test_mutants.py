"""A wrong migration is never certified: mutants of the golden programs, each with one mistake.

Each mutant is run by itself, and verified against the program that it was made of. Where its result
is another one, the ledger may not call all of its places proved or replayed.

`python tests/migrate/test_mutants.py 300 1` draws so many, with seed 1, and prints a table.
"""

import collections
import contextlib
import io
import pathlib
import random
import shutil
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from mutants import Mutant, mutant, sites

import jax_dist
from jax_dist._compat import CAN_REWRITE
from jax_dist.migrate import migration
from jax_dist.migrate.migration import MigrationOptions
from jax_dist.migrate.results import FileMigration
from jax_dist.migrate.verify.ledger import Rung
from jax_dist.migrate.verify.trial import verified

_GOLDEN = pathlib.Path(__file__).with_name("golden")


def _programs() -> Iterator[tuple[str, str]]:
    for path in sorted(_GOLDEN.glob("*.txt")):
        yield path.stem, path.read_text().partition("\n# --- to ")[0] + "\n"


def _migrated(folder: pathlib.Path, text: str) -> str | None:
    """What the program becomes with plain JAX; its helpers are in the folder."""
    (folder / ".git").mkdir(parents=True)
    path = folder / "program.py"
    path.write_text(text)
    files, _ = migration.migrate([str(path)], MigrationOptions(to="jax"), helpers="")
    for file in files:
        if file.changed and file.is_new:
            pathlib.Path(file.path).write_bytes(file.after)
    return next((f.after.decode() for f in files if f.path == str(path) and f.changed), None)


def _result(text: str, folder: pathlib.Path) -> Any:
    """What a program computes: bytes, types and numbers of devices; a text where it raises."""
    jax.clear_caches()
    program = types.ModuleType("program")
    program.__file__ = str(folder / "program.py")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setitem(sys.modules, "program", program)
        patch.delitem(sys.modules, "_mapped", raising=False)
        patch.syspath_prepend(str(folder))
        patch.chdir(folder)
        try:
            exec(compile(text, program.__file__, "exec"), vars(program))  # noqa: S102
            leaves = jax.tree.leaves(program.result())
            return [_bits(leaf) for leaf in leaves], out.getvalue()
        except Exception as error:  # noqa: BLE001  # a mutant may raise anything
            return type(error).__name__


def _bits(leaf: Any) -> tuple[Any, ...]:
    devices = len(leaf.sharding.device_set) if isinstance(leaf, jax.Array) else 0
    if jax.numpy.issubdtype(getattr(leaf, "dtype", type(leaf)), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return array.tobytes(), str(array.dtype), array.shape, devices


def _told(pairs: Sequence[tuple[str, str, pathlib.Path]], work: pathlib.Path) -> list[Rung]:
    """The least sure place of each migration: before, after, the folder of its helpers."""
    files = []
    for number, (before, after, helpers) in enumerate(pairs):
        folder = work / str(number)
        shutil.copytree(helpers, folder)
        path = folder / "program.py"
        path.write_text(before)
        files.append(FileMigration(str(path), before.encode(), after.encode()))
    command = work / "every.py"
    command.write_text(_EVERY.format([file.path for file in files]))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        patch.setenv("PYTHONPATH", str(pathlib.Path(jax_dist.__file__).parents[1]))
        found = verified([sys.executable, str(command)], files)
    rungs = [[each.rung for each in found.entries if each.path == file.path] for file in files]
    return [min(each, default=Rung.NEVER_RAN) for each in rungs]


_EVERY = """\
import os, runpy, sys
import jax
for file in {}:
    sys.modules.pop("_mapped", None)
    sys.path[0] = os.path.dirname(file)
    jax.clear_caches()
    print(jax.tree.map(str, runpy.run_path(file)["result"]()))
"""


def _drawn(number: int, seed: int, folder: pathlib.Path) -> Iterator[tuple[Mutant, str, Any, Any]]:
    """`(mutant, how sure, result before, result after)` of mutants that run."""
    pool = []
    for name, text in _programs():
        after = _migrated(folder / name, text) if "def result()" in text else None
        by_kind = collections.defaultdict(list)
        for kind, node in sites(after) if after is not None else ():
            by_kind[kind].append((name, text, after, kind, node))
        for each in by_kind.values():
            pool += random.Random(seed).sample(each, min(3, len(each)))
    random.Random(seed).shuffle(pool)
    results: dict[str, Any] = {}
    drawn, pairs = [], []
    for name, text, after, kind, node in pool:
        here, mutated = folder / name, mutant(after, kind, node)
        if name not in results:
            results[name] = _result(text, here)
        result = _result(mutated.text, here)
        if isinstance(result, str) or isinstance(results[name], str):
            continue  # it raises, and so nobody believes it
        drawn.append((mutated, results[name], result))
        pairs.append((text, mutated.text, here))
        if len(drawn) == number:
            break
    (folder / "verified").mkdir()
    told = _told(pairs, folder / "verified")
    for (mutated, before, after), rung in zip(drawn, told, strict=True):
        yield mutated, str(rung), before, after


_TRACED_ONCE = {
    "scan": "lax.scan(lambda_, x, None, 2)[0]",
    "while": "lax.while_loop(below, inner, x)",
    "cond": "lax.cond(True, inner, inner, x)",
    "jit": "jitted(x)",
    "checkpoint": "jax.checkpoint(inner)(x)",
    "custom_jvp": "custom(x)",
    "nested jit": "jax.jit(lambda y: jitted(y))(x)",
}


@pytest.fixture(scope="module")
def traced_once(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Rung]]:
    """Of each, how sure the right migration is, and the wrong one."""
    folder, pairs = tmp_path_factory.mktemp("programs"), []
    for name, call in _TRACED_ONCE.items():
        before = f"""\
import jax
import jax.numpy as jnp
from jax import lax


def inner(x):
    return lax.pmean(x, "i") + 1


def lambda_(x, _):
    return inner(x), None


def below(x):
    return x.sum() < 9


jitted = jax.jit(inner)
custom = jax.custom_jvp(inner)
custom.defjvp(lambda primals, tangents: (inner(*primals), inner(*tangents)))
step = jax.pmap(lambda x: {call}, "i")


def result():
    return step(jnp.arange(8.0))
"""
        after = _migrated(folder / name, before)
        assert after is not None
        pairs += [(before, text, folder / name) for text in (after, after.replace("pmean", "psum"))]
    (folder / "verified").mkdir()
    told = _told(pairs, folder / "verified")
    return dict(zip(_TRACED_ONCE, map(list, zip(told[::2], told[1::2], strict=True)), strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("name", _TRACED_ONCE)
def test_what_jax_traces_once_is_not_taken_from_the_other_form(traced_once, name: str):
    right, wrong = traced_once[name]

    assert right in (Rung.SAME_PROGRAM, Rung.REPLAYED)
    assert wrong is Rung.DIFFERENT


@pytest.mark.slow
@pytest.mark.skipif(not CAN_REWRITE, reason="jax.pmap was another program")
def test_no_mutant_that_changes_a_result_is_called_the_same(tmp_path: pathlib.Path):
    told = list(_drawn(40, seed=0, folder=tmp_path))

    assert len(told) == 40
    assert [
        (each.kind, each.line, rung)
        for each, rung, before, after in told
        if before != after and rung in ("same program", "equal by rules", "replayed")
    ] == []
    assert any(rung == "same program" for _, rung, _, _ in told)  # equal mutants can be proved


def _table(number: int, seed: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as place:
        counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
        for each, rung, before, after in _drawn(number, seed, pathlib.Path(place)):
            counts[each.kind][rung if before == after else f"{rung}, other result"] += 1
        for kind, each in sorted(counts.items()):
            yield f"| {kind} | {dict(each)} |\n"


if __name__ == "__main__":
    sys.stdout.writelines(_table(int(sys.argv[1]), int(sys.argv[2])))
