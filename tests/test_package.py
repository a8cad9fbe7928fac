"""The public names, and what importing them costs."""

import ast
import importlib
import importlib.util
import inspect
import pathlib
import pickle
import subprocess
import sys

import pytest

import jax_dist
from jax_dist import errors


def test_type_checkers_see_the_names_that_load_on_first_use():
    stub = ast.parse(pathlib.Path(jax_dist.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.asname: node.module for node in imports for alias in node.names}

    assert homes.keys() == set(jax_dist.__all__) - {"__version__"}
    for name, module in jax_dist._HOMES.items():
        assert homes[name] == f"jax_dist.{module}"


def test_every_name_resolves_and_is_listed():
    for name in jax_dist.__all__:
        assert getattr(jax_dist, name) is not None
        assert name in dir(jax_dist)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'jax_dist' has no attribute 'nothing'"):
        jax_dist.nothing  # noqa: B018  # the access is what is tested


def test_importing_the_package_does_not_import_jax():
    probe = (
        "import sys, jax_dist\n"
        "print('jax' in sys.modules)\n"
        "jax_dist.pmap\n"
        "print('jax' in sys.modules)\n"
    )

    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)

    # The second line shows that the first one can fail.
    assert run.stdout.split() == ["False", "True"]


def test_importing_pmap_does_not_start_the_backend():
    probe = (
        "import jax, jax_dist\n"
        "jax_dist.pmap(lambda x: x, 'i')\n"
        "jax.config.update('jax_num_cpu_devices', 3)  # raises once the backend runs\n"
        "print(jax.device_count('cpu'))"
    )

    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)

    assert run.stdout.split() == ["3"], run.stderr


def test_every_error_is_public_and_has_a_sentence():
    classes = {name for name, kind in vars(errors).items() if inspect.isclass(kind)} - {"Sequence"}

    assert set(errors.__all__) == classes
    for name in classes:
        assert getattr(errors, name).__doc__.endswith((".", ")."))


@pytest.mark.parametrize("name", errors.__all__)
def test_an_error_travels_between_processes(name):
    kind = getattr(errors, name)
    error = kind("what:\n  * which")
    error.add_note("rank 3")

    again = pickle.loads(pickle.dumps(error))

    assert type(again) is kind
    assert kind.__module__ == "jax_dist.errors"
    assert (str(again), again.__notes__) == ("what:\n  * which", ["rank 3"])


_ROOT = pathlib.Path(__file__).parents[1]
_PROGRAMS = sorted([*(_ROOT / "benchmarks").glob("*.py"), *(_ROOT / "examples").glob("*.py")])


@pytest.mark.parametrize("path", _PROGRAMS, ids=lambda path: path.name)
def test_what_programs_import_is_there(path: pathlib.Path):
    """Not all of them run in each test run."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jax_dist":
            module = importlib.import_module(str(node.module))
            for name in (alias.name for alias in node.names):
                if not hasattr(module, name):  # a module of a package
                    importlib.import_module(f"{node.module}.{name}")
