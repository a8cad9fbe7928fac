"""Which folder is taken, who may be trusted with it, and what is set and put back."""

import os
import pathlib
import re
import stat

import cache_runs
import jax
import pytest

from jax_dist import cache
from jax_dist.cache import store
from jax_dist.errors import CacheDirectoryError, CacheWarning

PART = re.compile(r"\w+-[0-9a-f]{8}-jaxlib-\d+\.\d+\.\d+(\.\d+)?")


@pytest.fixture(autouse=True)
def _off_afterwards():
    yield
    cache.enable(None)


def _scale(factor):
    def scale(x):
        return x * factor

    return jax.jit(scale)


@pytest.mark.parametrize(
    ("argument", "variables", "chosen"),
    [
        ("/a", {"JAX_DIST_CACHE_DIR": "/b", "JAX_COMPILATION_CACHE_DIR": "/c"}, "/a"),
        (None, {"JAX_DIST_CACHE_DIR": "/b", "JAX_COMPILATION_CACHE_DIR": "/c"}, "/b"),
        (None, {"JAX_DIST_CACHE_DIR": "", "JAX_COMPILATION_CACHE_DIR": "/c"}, "/c"),
        (None, {"XDG_CACHE_HOME": "/x"}, "/x/jax_dist"),
        (pathlib.Path("/a"), {}, "/a"),
        ("gs://bucket/cache", {}, "gs://bucket/cache"),
        ("file:///a/b", {}, "/a/b"),
    ],
)
def test_the_nearest_word_counts(monkeypatch, argument, variables, chosen):
    monkeypatch.setattr("sys.platform", "linux")

    assert store.chosen(argument, variables) == chosen


def test_the_default_is_in_the_home_of_the_user(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setattr("sys.platform", "linux")

    assert store.chosen(None, {}) == "/home/ada/.cache/jax_dist"
    assert store.chosen("~/mine", {}) == "/home/ada/mine"


def test_the_folder_is_for_its_user_alone_and_for_this_machine(tmp_path):
    folder = pathlib.Path(cache.enable(tmp_path / "new" / "cache"))

    assert folder.parent == tmp_path / "new" / "cache"
    assert PART.fullmatch(folder.name)
    made = (folder, folder.parent, folder.parent.parent)
    assert [stat.S_IMODE(each.stat().st_mode) for each in made] == [0o700] * 3


def test_the_variable_is_read_when_enable_is_called(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_DIST_CACHE_DIR", str(tmp_path / "ours"))

    assert pathlib.Path(cache.enable()).parent == tmp_path / "ours"


def test_settings_are_made_and_put_back(tmp_path):
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    settings = lambda: [getattr(jax.config, name) for name in names]
    before = settings()
    folder = cache.enable(tmp_path, min_compile_seconds=0.5)

    assert settings() == [folder, 0.5, 0]
    assert cache.enable(None) is None
    assert settings() == [None, *before[1:]]


def test_off_is_off(tmp_path):
    cache.enable(tmp_path)
    cache.enable(None)
    _scale(2.0)(1.0)

    assert list(tmp_path.rglob("*-cache")) == []


def test_another_folder_takes_over(tmp_path):
    cache.enable(tmp_path / "a")
    _scale(3.0)(1.0)
    cache.enable(tmp_path / "b")
    _scale(4.0)(1.0)

    count = lambda name: len(list((tmp_path / name).rglob("jit_scale-*-cache")))
    assert (count("a"), count("b")) == (1, 1)


def test_a_folder_that_somebody_sets_later_is_left_to_jax(tmp_path):
    cache.enable(tmp_path / "ours")
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
    jax.experimental.compilation_cache.compilation_cache.reset_cache()
    _scale(5.0)(1.0)

    files = [path.name.rpartition("-")[2] for path in (tmp_path / "theirs").iterdir()]
    assert set(files) == {"cache"}


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_a_folder_that_everybody_can_write_to_is_refused(tmp_path, mode):
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(CacheDirectoryError) as caught:
        cache.enable(folder)

    assert str(caught.value) == (
        "A compilation cache cannot be trusted where anybody can change it:\n"
        f"  * {folder} has mode {mode:04o} and belongs to user {os.getuid()}\n"
        "Because every user of this machine may write there, and JAX runs the machine code that it "
        "finds in its cache.\n"
        f"Name a folder of your own, or make this one yours alone: chmod 700 {folder}"
    )
    assert jax.config.jax_compilation_cache_dir is None


def test_a_part_that_everybody_can_write_to_is_refused(tmp_path):
    folder = pathlib.Path(cache.enable(tmp_path))
    folder.chmod(0o777)

    with pytest.raises(CacheDirectoryError, match=f"{folder} has mode 0777"):
        cache.enable(tmp_path)


def test_a_folder_that_everybody_can_replace_is_refused(tmp_path):
    tmp_path.chmod(0o777)

    with pytest.raises(CacheDirectoryError, match="may put another folder in its place"):
        cache.enable(tmp_path / "cache")


def test_a_folder_of_ones_own_below_tmp_is_fine(tmp_path):
    tmp_path.chmod(0o1777)

    assert cache.enable(tmp_path / "cache") is not None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_that_another_user_made_below_tmp_is_refused(tmp_path):
    tmp_path.chmod(0o1777)
    (tmp_path / "cache").mkdir(mode=0o755)
    os.chown(tmp_path / "cache", 12345, 12345)

    with pytest.raises(CacheDirectoryError, match="another user made it"):
        cache.enable(tmp_path / "cache")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o770])
def test_root_is_refused_the_folder_of_another_user(tmp_path, mode):
    folder = pathlib.Path(cache.enable(tmp_path / "cache"))
    cache.enable(None)
    for each in (folder, folder.parent):
        each.chmod(mode)
        os.chown(each, 12345, 12345)

    with pytest.raises(CacheDirectoryError) as caught:
        cache.enable(tmp_path / "cache")
    assert str(caught.value).splitlines()[1:] == [
        f"  * {tmp_path / 'cache'} has mode {mode:04o} and belongs to user 12345",
        "Because it is another user's, and root can read it only because permissions do not bind "
        "it, and JAX runs the machine code that it finds in its cache.",
        "Name a folder of your own, or make this one yours alone: chown -R root "
        f"{tmp_path / 'cache'}",
    ]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_group_of_root_may_share_a_folder(tmp_path):
    os.chown(tmp_path, 12345, os.getegid())
    tmp_path.chmod(0o2770)

    assert cache.enable(tmp_path) is not None


def test_a_group_may_share_a_folder(tmp_path):
    tmp_path.chmod(0o2770)

    assert cache.enable(tmp_path) is not None


def test_a_file_in_place_of_the_folder_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.warns(CacheWarning, match="it is a file"):
        assert cache.enable(tmp_path / "file") is None

    assert _scale(6.0)(1.0) == 6.0


def test_a_url_without_its_packages_is_told(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.warns(CacheWarning) as caught:
        assert cache.enable("gs://bucket/cache") is None

    assert str(caught[0].message) == (
        "The compilation cache is off:\n"
        "  * gs://bucket/cache needs etils and fsspec\n"
        "Because JAX reads and writes URLs through these packages.\n"
        "Install etils[epath] and fsspec, with the one that knows the URL, such as gcsfs."
    )


def test_programs_that_compile_quickly_are_left_out_if_asked(tmp_path):
    cache.enable(tmp_path, min_compile_seconds=1000)
    with cache.stats() as seen:
        _scale(7.0)(1.0)

    assert seen.unwritten == {"it compiled in less than 1000 s": 1}


def test_the_limit_holds_over_runs(tmp_path):
    functions = {"functions": ["a", "b", "c", "d"]}
    whole = cache_runs.run(tmp_path / "whole", **functions)
    sizes = [path.stat().st_size for path in pathlib.Path(whole["folder"]).glob("*-cache")]
    limit = {"enable": {"max_size": sum(sizes) - 500}}  # bytes
    first = cache_runs.run(tmp_path / "cache", **functions, **limit)
    left = sorted(path.name[:5] for path in pathlib.Path(first["folder"]).glob("*-cache"))

    assert left == ["jit_b", "jit_c", "jit_d"]  # the first was not used for longest


def test_a_size_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'much' is no size; write it as 500MB or 2GiB"):
        cache.enable(tmp_path, max_size="much")
