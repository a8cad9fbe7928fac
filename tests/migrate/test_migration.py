"""Several files together: their order, progress, and files with something wrong."""

import pathlib
import time

import pytest
from migrated import CONSTANTS, USER, migrate

from jax_dist.migrate import migration

_FLAT = "import jax\n\nf = jax.pmap(abs)\n"


def test_files_without_a_place_are_not_named(package: pathlib.Path):
    (package / "a.py").write_text("import jax\nprint(jax.devices())\n")
    (package / "b.py").write_text("pmap = 1\n")
    (package / "c.py").write_text("def f(:\n")

    assert migrate("pkg/a.py", "pkg/b.py", "pkg/c.py") == []


def test_files_that_cannot_be_read_are_named(package: pathlib.Path):
    (package / "a.py").write_bytes(b"import jax\nf = jax.pmap(abs)  # \xff\n")
    (package / "b.ipynb").write_text("jax.pmap")
    (package / "c.py").write_text("import jax\nf = jax.pmap(\n")
    (package / "d.py").write_text("import jax\nf = jax.pmap(\n" + "(" * 4000)
    (package / "e.py").write_text("import jax\nf = jax.pmap(" + "-" * 60000 + "1)\n")

    found = migrate(*(f"pkg/{name}" for name in ("a.py", "b.ipynb", "c.py", "d.py", "e.py", "f")))

    assert [(file.path, file.problem.partition(":")[0], file.changed) for file in found] == [
        ("pkg/a.py", "the file is not utf-8", False),
        ("pkg/b.ipynb", "the file is no notebook", False),
        ("pkg/c.py", "Python cannot parse it", False),
        ("pkg/d.py", "Python cannot parse it", False),
        ("pkg/e.py", "Python cannot parse it", False),
        ("pkg/f", "it cannot be read", False),
    ]


def test_an_error_of_ours_stays_in_its_file(package: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    for name in "ab":
        (package / f"{name}.py").write_text(_FLAT)
    work = migration.of_source

    def broken(source, *arguments):
        if source.path == "pkg/a.py":
            raise IndexError("ours")
        return work(source, *arguments)

    monkeypatch.setattr(migration, "of_source", broken)

    a, b = migrate("pkg/a.py", "pkg/b.py")

    assert a.problem == "jax-dist failed on it (IndexError: ours); please report this"
    assert not a.changed
    assert b.changed


@pytest.mark.thorough
@pytest.mark.parametrize("to", ["jax_dist", "jax"])
def test_three_times_as_many_take_three_times_as_long(package: pathlib.Path, to: str):
    seconds = []
    for number in (1000, 3000):
        lines = (f"f{i} = jax.pmap(lambda x: x + {i})\n" for i in range(number))
        (package / "a.py").write_text("import jax\n" + "".join(lines))
        begin = time.process_time()
        (found,) = migrate("pkg/a.py", to=to)[:1]
        seconds.append(time.process_time() - begin)
        assert sum(place.status == "done" for place in found.outcomes) == number

    assert seconds[1] < 6 * seconds[0]  # 9 where each is compared with each


def test_progress_is_told(package: pathlib.Path):
    for name in ("a", "b", "c"):
        (package / f"{name}.py").write_text(_FLAT)
    (package / "d.py").touch()
    told: list[tuple[int, int]] = []

    migrate(
        *(f"pkg/{name}.py" for name in "abcd"),
        progress=lambda done, total: told.append((done, total)),
    )

    assert told == [(2, 4), (3, 4), (4, 4)]


def test_the_order_of_the_files_is_that_of_the_paths(package: pathlib.Path):
    (package / "constants.py").write_text(CONSTANTS)
    for name in ("zeta", "alpha", "mid"):
        (package / f"{name}.py").write_text(USER)
    paths = [f"pkg/{name}.py" for name in ("zeta", "constants", "alpha", "mid")]

    assert [file.path for file in migrate(*paths)] == paths
