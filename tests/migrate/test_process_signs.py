"""Several processes are concluded from a program's own calls and its launcher, and named."""

import dataclasses
import pathlib
import sys

import pytest
import recorded

from jax_dist.migrate import migration, report
from jax_dist.migrate.migration import MigrationOptions
from jax_dist.migrate.results import Form

_PROGRAM = "import jax\nfrom common import x\nf = jax.pmap(lambda y: y)\nf(x)\n"
_WORDS = "the program may run in several processes, without --one-process: "


@pytest.fixture
def project(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "train.py").write_text(_PROGRAM)
    (tmp_path / "common.py").write_text("import jax\nx = jax.numpy.ones(8)\n")
    return tmp_path


def _sign(project: pathlib.Path, name: str = "train.py") -> str:
    path = str(project / name)
    _, context = migration.migrate([path], MigrationOptions(to="jax"))
    return context.sign(path)


_HARMLESS = {
    "a print in the first process": "if jax.process_index() == 0: print(1)",
    "a name for it": "rank = jax.process_index()\nif rank == 0: print(rank)",
    "not the first": "if not jax.process_index(): print(1)",
    "a log": "import logging\nlogging.info('%d of %d', jax.process_index(), jax.process_count())",
    "a refusal": "assert jax.process_count() == 1",
    "words": "num_nodes = 3  # multihost, srun\nprint('multi-process', num_nodes)",
    "another library": "from multiprocessing import Pool",
}
_SIGNS = {
    "join": ("jax.distributed.initialize()", "jax.distributed.initialize", 3),
    "utilities": (
        "from jax.experimental import multihost_utils\nmultihost_utils.sync_global_devices('a')",
        "multihost_utils.sync_global_devices",
        4,
    ),
    "global arrays": (
        "y = jax.make_array_from_process_local_data(None, x)",
        "jax.make_array_from_process_local_data",
        3,
    ),
    "input of this host": ("y = x[jax.process_index()::2]", "jax.process_index", 3),
    "a key for each": ("r = jax.process_index()\nk = jax.random.key(r)", "jax.process_index", 3),
    "a share": ("from jax import process_count\nn = 64 // process_count()", "process_count", 4),
    "mpi": ("from mpi4py import MPI", "mpi4py", 3),
}


@pytest.mark.parametrize("text", _HARMLESS.values(), ids=_HARMLESS)
def test_what_shows_nothing(project: pathlib.Path, text: str):
    with (project / "common.py").open("a") as file:
        file.write(text)

    assert _sign(project) == ""


@pytest.mark.parametrize(("text", "word", "line"), _SIGNS.values(), ids=_SIGNS)
def test_what_shows_several_processes(project: pathlib.Path, text: str, word: str, line: int):
    with (project / "common.py").open("a") as file:
        file.write(text)

    assert _sign(project) == f"{word} in common.py:{line}"


def test_another_program_of_the_project_shows_nothing(project: pathlib.Path):
    (project / "serve.py").write_text("import jax\nimport common\njax.distributed.initialize()\n")

    assert _sign(project) == ""
    assert _sign(project, "common.py") == "jax.distributed.initialize in serve.py:3"


@pytest.mark.parametrize(
    ("name", "text", "sign"),
    [
        ("run.sh", "srun -N 2 \\\n  python train.py\n", "srun in run.sh:1"),
        ("run.sh", "srun -N 2 python serve.py\n", ""),
        ("run.sh", "srun hostname\npython train.py\n", ""),
        ("job.sbatch", "#SBATCH --nodes=2\npython -m train\n", "#SBATCH --nodes in job.sbatch:1"),
        ("README.md", "Multi-host training with SLURM: python train.py\n", ""),
        ("README.md", "    torchrun --nproc 2 train.py\n", "torchrun in README.md:1"),
    ],
)
def test_how_a_program_is_started(project: pathlib.Path, name: str, text: str, sign: str):
    (project / name).write_text(text)

    assert _sign(project) == sign


@pytest.mark.parametrize("to", ["jax", "global"])
def test_what_stands_in_the_way_is_said_with_the_flag(project: pathlib.Path, to: str):
    (project / "common.py").write_text("import jax\njax.distributed.initialize()\nx = 1\n")
    step = "import jax, common\nf = jax.pmap(lambda s: s - jax.lax.pmean(s, 'i'), axis_name='i')\n"
    (project / "train.py").write_text(f"{step}s = f(jax.numpy.ones((8, 3)))\ns = f(s)\n")
    options = MigrationOptions(to=to, plainest=Form.IDIOMATIC)
    files, context = migration.migrate([str(project / "train.py")], options)
    said = [o.why + o.remedy for file in files for o in file.outcomes]
    said += report.cautions_of(files, context, options)

    assert any("--one-process" in each and "common.py:2" in each for each in said), said


def test_the_reason_why_an_axis_stays_is_said(project: pathlib.Path):
    text = "import jax\nf = jax.pmap(lambda x, y: x + y, in_axes=(None, 0), axis_name='i')\n"
    (project / "train.py").write_text(f"{text}f(1, jax.numpy.ones(8))\n")
    (project / "run.py").write_text("import train\n")
    flow = recorded.flow([project / "train.py"], [sys.executable, str(project / "run.py")])
    options = dataclasses.replace(recorded.OPTIONS, flow=flow)
    files, _ = migration.migrate([str(project / "train.py")], options)
    found = report.MigrationReport("jax", files).with_axis()

    assert [(where.endswith("train.py:2"), more, why) for where, more, why in found] == [
        (
            True,
            0,
            "jax.numpy.ones(8) of line 3 is not known to make copies or rows; what it returns may "
            "differ from device to device",
        )
    ]


@pytest.mark.parametrize(
    ("flax", "said"), [("0.12.7", False), ("0.13.0", False), ("0.10.2", True), ("", True)]
)
def test_a_note_on_flax_is_about_the_files_of_the_run(
    project: pathlib.Path, monkeypatch: pytest.MonkeyPatch, flax: str, *, said: bool
):
    def version(name: str) -> str:
        if not flax:
            raise report.importlib.metadata.PackageNotFoundError(name)
        return flax

    monkeypatch.setattr(report.importlib.metadata, "version", version)
    (project / "other.py").write_text("from flax.jax_utils import replicate\n")
    options = MigrationOptions(to="jax_dist")
    for own in (False, True):
        if own:
            (project / "common.py").write_text(
                "from flax import jax_utils\njax_utils.replicate\nx=1"
            )
        files, context = migration.migrate([str(project / "train.py")], options)
        found = [*report.cautions_of(files, context, options)]

        assert any("flax" in each for each in found) is (own and said)
