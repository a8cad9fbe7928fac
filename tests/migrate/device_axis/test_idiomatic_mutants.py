"""A wrong idiomatic migration is never called the same: its mutants, judged by two runs.

`PYTHONPATH=tests/migrate python tests/migrate/device_axis/test_idiomatic_mutants.py 60 1` draws so
many, with seed 1, and prints each.
"""

import collections
import dataclasses
import os
import pathlib
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest
import recorded
from mutants import Mutant, mutant, sites

import jax_dist
from jax_dist._compat import CAN_REWRITE
from jax_dist.migrate import migration
from jax_dist.migrate.results import FileMigration
from jax_dist.migrate.verify import trial
from jax_dist.migrate.verify.ledger import Rung

_FOLDER = pathlib.Path(__file__).with_name("idiomatic_programs")
_ROOT = pathlib.Path(jax_dist.__file__).parents[1]
_COMMAND = [sys.executable, "program.py"]
# What a program gives is printed, for what nobody maps or prints no verification can see.
_PRINTED = """

if __name__ == "__main__":
    for leaf in jax.tree.leaves(result()):
        if jax.numpy.issubdtype(getattr(leaf, "dtype", type(leaf)), jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        print(np.asarray(leaf).dtype, np.asarray(leaf).shape, np.asarray(leaf).tobytes().hex())
"""


def _migrated(folder: pathlib.Path, name: str) -> FileMigration:
    """A program; the module of its helpers is in the folder."""
    text = (_FOLDER / f"{name}.txt").read_text().partition("# --- becomes\n")[0]
    (folder / ".git").mkdir(parents=True)
    path = folder / "program.py"
    path.write_text(f"import jax\nimport numpy as np\n{text}{_PRINTED}")
    flow = recorded.flow([path], [sys.executable, str(path)])
    options = dataclasses.replace(recorded.OPTIONS, flow=flow)
    found, _ = migration.migrate([str(path)], options, helpers="")
    for each in found:
        if each.is_new:
            pathlib.Path(each.path).write_bytes(each.after)
    return next(each for each in found if each.path == str(path))


def _printed(text: str, folder: pathlib.Path) -> str | None:
    """What a program prints, with the helpers of a folder; None where it fails."""
    with tempfile.TemporaryDirectory() as place:
        pathlib.Path(place, "program.py").write_text(text)
        flags = "--xla_force_host_platform_device_count=8"
        path = os.pathsep.join([str(_ROOT), str(folder)])
        environment = {"PYTHONPATH": path, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        ran = subprocess.run(
            _COMMAND,
            cwd=place,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
    return ran.stdout if ran.returncode == 0 else None


def _drawn(
    number: int, seed: int, folder: pathlib.Path, names: list[str]
) -> Iterator[tuple[str, Mutant, Rung, bool]]:
    """`(program, mutant, its worst place, whether it prints the same)`, of mutants that run."""
    choice, pool = random.Random(seed), []
    programs = {name: _migrated(folder / name, name) for name in names}
    for name, program in programs.items():
        by_kind = collections.defaultdict(list)
        for kind, node in sites(program.after.decode()):
            by_kind[kind].append((name, kind, node))
        for each in by_kind.values():
            pool += choice.sample(each, min(2, len(each)))
    choice.shuffle(pool)
    for name, kind, node in pool:
        program = programs[name]
        mutated = mutant(program.after.decode(), kind, node)
        result = _printed(mutated.text, folder / name)
        if result is None:
            continue  # it raises, and so nobody believes it
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder / name)
            patch.setenv("PYTHONPATH", str(_ROOT))
            wrong = dataclasses.replace(program, after=mutated.text.encode())
            ledger = trial.verified(_COMMAND, [wrong])
        same = result == _printed(program.before.decode(), folder / name)
        yield name, mutated, ledger.worst, same
        number -= 1
        if not number:
            return


@pytest.mark.slow
@pytest.mark.skipif(not CAN_REWRITE, reason="jax.pmap was another program")
def test_no_idiomatic_mutant_that_changes_a_result_is_called_the_same(tmp_path):
    pytest.importorskip("flax")
    small = ["batch_reshaped", "in_one_line", "metrics_in_a_list", "python_numbers"]
    told = list(_drawn(12, 0, tmp_path, small))

    assert len(told) == 12
    assert [each for each in told if not each[-1] and each[2] > Rung.RAN] == []
    assert any(not same for *_, same in told)
    assert any(worst > Rung.RAN for _, _, worst, _ in told)  # an equal one may be called so


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        every = sorted(path.stem for path in _FOLDER.glob("*.txt"))
        for who, what, worst, same in _drawn(
            int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(place), every
        ):
            result = "the same result" if same else "another result"
            sys.stdout.write(f"{who}: {what.kind}, line {what.line}: {worst}, {result}\n")
            sys.stdout.flush()
