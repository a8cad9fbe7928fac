"""The wheel: what it holds, what it says of itself, and that it runs where nothing else is."""

import email
import pathlib
import subprocess
import sys
import zipfile

import pytest

import jax_dist

pytestmark = pytest.mark.thorough
_ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("wheel")
    _pip("wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(_ROOT))
    [path] = folder.glob("*.whl")
    return path


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.fixture(scope="module")
def empty_environment(wheel, tmp_path_factory) -> pathlib.Path:
    """Return an environment that holds the wheel and nothing else: no jax, no numpy."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    _pip("--python", str(folder / "bin" / "python"), "install", "--quiet", "--no-deps", str(wheel))
    return folder / "bin"


def _run(*command: str | pathlib.Path, folder: pathlib.Path) -> tuple[int, str]:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "NO_COLOR": "1"}
    ran = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return ran.returncode, ran.stdout + ran.stderr


def test_it_holds_the_package_and_its_types(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    wanted = {
        path.relative_to(_ROOT).as_posix()
        for path in (_ROOT / "jax_dist").rglob("*")
        if path.suffix in (".py", ".typed")
    }

    assert tops == {"jax_dist", f"jax_dist-{jax_dist.__version__}.dist-info"}
    assert "jax_dist/py.typed" in names
    assert wanted <= set(names)


def test_its_metadata_is_complete(wheel):
    archive = zipfile.ZipFile(wheel)
    info = f"jax_dist-{jax_dist.__version__}.dist-info"
    metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
    needed = [each for each in metadata.get_all("Requires-Dist") if "extra" not in each]

    assert metadata["Name"] == "jax-dist"
    assert metadata["Version"] == jax_dist.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().startswith("# jax_dist")
    assert metadata["Summary"]
    assert metadata["Keywords"]
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    assert [each.split(">")[0] for each in needed] == ["jax", "jaxlib", "numpy", "psutil", "rich"]
    assert f"{info}/licenses/LICENSE" in archive.namelist()
    assert (
        "jax-dist = jax_dist.cli.main:run_as_program"
        in archive.read(f"{info}/entry_points.txt").decode()
    )


def test_the_checker_runs_where_nothing_else_is(empty_environment, tmp_path):
    source = tmp_path / "train.py"
    source.write_text("import jax\n\nstep = jax.jit(jax.pmap(abs, axis_name='i'))\n")
    folder, command = tmp_path, empty_environment / "jax-dist"

    code, out = _run(empty_environment / "python", "-c", "import jax_dist, jax", folder=folder)
    assert (code, "No module named 'jax'" in out) == (1, True)
    assert _run(command, "--version", folder=folder) == (0, f"jax-dist {jax_dist.__version__}\n")
    code, out = _run(command, "lint", "--quiet", "train.py", folder=folder)
    assert (code, "train.py:3:8: JXD002 jax.pmap inside jax.jit" in out) == (1, True)
    code, out = _run(command, "migrate", "--quiet", "train.py", folder=folder)
    assert "+step = jax_dist.pmap(abs, axis_name='i')" in out


def test_the_doctor_says_that_jax_is_missing(empty_environment, tmp_path):
    code, out = _run(empty_environment / "jax-dist", "doctor", folder=tmp_path)

    assert code == 1
    assert "problem: jax is not installed for this Python: pip install -U jax" in out


@pytest.mark.slow
def test_a_fresh_environment_computes(wheel, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    python = tmp_path / "env" / "bin" / "python"
    _pip("--python", str(python), "install", "--quiet", str(wheel))
    program = (
        "import jax, numpy as np, jax_dist\n"
        "total = jax_dist.pmap(lambda x: jax.lax.psum(x, 'i'), axis_name='i')\n"
        "print(jax.jit(total)(np.arange(8.0)).tolist())\n"
    )

    environment = {"PATH": "/usr/bin:/bin", "JAX_NUM_CPU_DEVICES": "8", "HOME": str(tmp_path)}
    ran = subprocess.run(
        [python, "-c", program], env=environment, capture_output=True, text=True, check=False
    )

    assert ran.stdout == "[28.0, 28.0, 28.0, 28.0, 28.0, 28.0, 28.0, 28.0]\n", ran.stderr
