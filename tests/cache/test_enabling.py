"""The directory of the cache: which one, whether it is safe, and the settings of JAX."""

import os
import pathlib
import re
import stat
import sys

import jax
import numpy as np
import pytest

from jax_dist import cache
from jax_dist._cache import directories
from jax_dist.errors import ArgumentError, CacheWarning

OTHER_USER = 12345


@pytest.fixture(autouse=True)
def _off_afterwards():
    yield
    cache.enable(None)


def _scale(factor):
    def scale(x):
        return x * factor

    return jax.jit(scale)(np.float32(1))


@pytest.mark.parametrize(
    ("argument", "variables", "chosen"),
    [
        ("/a", {"JAX_DIST_CACHE_DIR": "/b", "JAX_COMPILATION_CACHE_DIR": "/c"}, "/a"),
        ("", {"JAX_DIST_CACHE_DIR": "/b", "JAX_COMPILATION_CACHE_DIR": "/c"}, "/b"),
        ("", {"JAX_DIST_CACHE_DIR": "", "JAX_COMPILATION_CACHE_DIR": "/c"}, "/c"),
        ("", {"XDG_CACHE_HOME": "/x"}, "/x/jax_dist"),
        ("", {}, "/home/ada/.cache/jax_dist"),
        ("~/mine", {}, "/home/ada/mine"),
        (pathlib.Path("/a"), {}, "/a"),
        ("gs://bucket/cache", {}, "gs://bucket/cache"),
        ("file:///a/b", {}, "/a/b"),
    ],
)
def test_the_directory_is_the_argument_or_a_variable_or_the_default(
    monkeypatch, argument, variables, chosen
):
    monkeypatch.setenv("HOME", "/home/ada")

    assert directories.choose(argument, variables) == chosen


def test_a_new_directory_is_for_its_user_and_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_DIST_CACHE_DIR", str(tmp_path / "new" / "cache"))
    folder = pathlib.Path(cache.enable())

    assert folder.parent == tmp_path / "new" / "cache"
    assert re.fullmatch(r"\w+-[0-9a-f]{8}-jaxlib-\d+\.\d+\.\d+(\.\d+)?", folder.name)
    made = (folder, folder.parent, folder.parent.parent)
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o700] * 3


def test_settings_are_made_and_put_back(tmp_path):
    names = ("compilation_cache_dir", "persistent_cache_min_compile_time_secs")
    settings = lambda: [getattr(jax.config, f"jax_{name}") for name in names]
    before = settings()
    folder = cache.enable(tmp_path, min_compile_seconds=0.5)

    assert settings() == [folder, 0.5]
    assert cache.enable(None) is None
    assert settings() == [None, before[1]]
    _scale(2.0)
    assert list(tmp_path.rglob("*-cache")) == []


def test_another_directory_takes_over_and_one_that_is_set_later_is_left_to_jax(tmp_path):
    cache.enable(tmp_path / "a")
    _scale(3.0)
    cache.enable(tmp_path / "b")
    _scale(4.0)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
    jax.experimental.compilation_cache.compilation_cache.reset_cache()
    _scale(5.0)

    count = lambda name: len(list((tmp_path / name).rglob("jit_scale-*-cache")))
    assert [count(name) for name in ("a", "b", "theirs")] == [1, 1, 1]


def _chown(path: pathlib.Path) -> None:
    os.chown(path, OTHER_USER, OTHER_USER)


# The modes of proj and proj/cache, what belongs to another user, and the reason if it is not safe.
_DIRECTORIES = {
    "private": (0o755, 0o700, "", None),
    "shared with a group": (0o755, 0o2770, "", None),
    "own, below one like /tmp": (0o1777, 0o755, "", None),
    "writable by all": (0o755, 0o777, "", "can replace {cache}/"),
    "writable, not readable": (0o755, 0o702, "", "can replace {cache}/"),
    "replaceable": (0o777, 0o700, "", "can replace {cache}, since every user can write to {proj}"),
    "of another user, below one like /tmp": (0o1777, 0o755, "cache", "{cache} belongs to user"),
    "below that of another user": (0o1777, 0o755, "proj/..", "proj belongs to user 12345"),
    "given by another user": (0o755, 0o755, "cache", None),
}


@pytest.mark.parametrize("name", _DIRECTORIES)
def test_a_directory_that_others_can_change_is_rejected(tmp_path, name):
    proj_mode, cache_mode, others, reason = _DIRECTORIES[name]
    if others and os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    proj = tmp_path / "proj"
    folder = proj / "cache"
    folder.mkdir(parents=True)
    proj.chmod(proj_mode)
    folder.chmod(cache_mode)
    if others == "cache":
        _chown(folder)
    elif others:  # as if another user had prepared proj/cache in /tmp
        tmp_path.chmod(0o1777)
        proj.chmod(0o755)
        _chown(proj)
    if reason is None:
        assert cache.enable(folder) is not None
        return

    with pytest.raises(ArgumentError, match="is not safe to load code from") as caught:
        cache.enable(folder)
    assert reason.format(proj=proj, cache=folder) in str(caught.value)
    assert jax.config.jax_compilation_cache_dir is None


def test_a_part_that_everybody_can_write_to_is_rejected(tmp_path):
    folder = pathlib.Path(cache.enable(tmp_path))
    folder.chmod(0o777)
    with pytest.raises(ArgumentError, match=f"every user can write to {folder}"):
        cache.enable(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link away")
def test_a_link_of_another_user_is_rejected(tmp_path):
    (tmp_path / "mine").mkdir(mode=0o700)
    common = tmp_path / "common"
    common.mkdir()
    common.chmod(0o1777)
    (common / "link").symlink_to(tmp_path / "mine")
    os.lchown(common / "link", OTHER_USER, OTHER_USER)

    with pytest.raises(ArgumentError, match=f"{common / 'link'} belongs to user {OTHER_USER}"):
        cache.enable(common / "link")


def test_a_file_in_place_of_the_directory_turns_the_cache_off(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.warns(CacheWarning, match=r"The compilation cache is off: .*Not a directory"):
        assert cache.enable(file) is None

    assert _scale(6.0) == 6.0
    assert file.read_text() == "mine"


def test_a_url_without_its_package_turns_the_cache_off(monkeypatch):
    monkeypatch.setitem(sys.modules, "etils", None)
    with pytest.warns(CacheWarning, match=r"gs://bucket/cache/.*: needs etils\[epath\]"):
        assert cache.enable("gs://bucket/cache") is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_size": "much"}, "max_size='much' is not a size such as 500MB or 2GiB"),
        ({"max_size": 0}, "max_size=0 is not a size"),
        ({"min_compile_seconds": "3"}, "min_compile_seconds='3' is not a time in seconds"),
        ({"min_compile_seconds": float("nan")}, "min_compile_seconds=nan is not a time"),
        ({"failures": "never"}, "failures='never' is not one of None, 'raise' and 'retry'"),
        ({"path": "gs://b/c", "failures": "raise"}, "needs a local directory, not gs://b/c"),
    ],
)
def test_other_arguments_are_rejected(tmp_path, options, message):
    with pytest.raises(ArgumentError, match=message):
        cache.enable(**{"path": tmp_path, **options})


def test_programs_that_compile_quickly_are_left_out_if_asked(tmp_path):
    cache.enable(tmp_path, min_compile_seconds=1000)
    with cache.stats() as seen:
        _scale(7.0)

    assert seen.unwritten == {"it compiled in less than 1000 s": 1}


@pytest.mark.parametrize("unit", ["", "kB"])
def test_a_limit_removes_the_least_recently_used(tmp_path, unit):
    folder = pathlib.Path(cache.enable(tmp_path))
    for factor in (10.0, 11.0):
        _scale(factor)
    first, second = sorted(folder.glob("*-cache"), key=lambda path: path.stat().st_mtime_ns)
    size = first.stat().st_size * 5 // 2
    abandoned, current = folder / ".jax-dist-1.tmp", folder / ".jax-dist-2.tmp"
    abandoned.touch()
    current.touch()
    os.utime(abandoned, (10, 10))
    os.utime(first, (10, 10))
    os.utime(second, (20, 20))
    cache.enable(tmp_path, max_size=f"{size / 1000:.6f} kB" if unit else size)
    jax.clear_caches()
    with cache.stats() as seen:
        _scale(10.0)  # used last now
        _scale(12.0)

    assert (seen.hits, seen.written) == (1, 1)
    left = set(folder.glob("*-cache"))
    assert len(left) == 2
    assert first in left
    assert second not in left
    assert current.exists()
    assert not abandoned.exists()


def test_a_url_that_jax_cannot_use_turns_the_cache_off():
    pytest.importorskip("etils")
    with pytest.warns(CacheWarning, match="nowhere://bucket"):
        assert cache.enable("nowhere://bucket") is None


def test_the_size_zero_of_jax_turns_the_cache_off(tmp_path):
    jax.config.update("jax_compilation_cache_max_size", 0)
    try:
        assert cache.enable(tmp_path) is None
        assert cache.enable(tmp_path, max_size=-1) is not None
    finally:
        jax.config.update("jax_compilation_cache_max_size", -1)
        cache.enable(None)
