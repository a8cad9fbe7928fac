"""The prefilter finds what a plain search for each word finds."""

import hypothesis
import pytest
from hypothesis import strategies

from jax_dist.checker import prefilter

_LETTERS = strategies.lists(strategies.sampled_from(b"ab.("), max_size=9).map(bytes)
_WORDS = strategies.lists(_LETTERS.filter(bool), max_size=8)


@hypothesis.given(_WORDS, strategies.lists(_LETTERS, max_size=4).map(b"".join))
@hypothesis.example([b"aaaa.", b"aaaab", b"aaaa("], b"xaaaa(")
@hypothesis.example([b"aaaa", b"aaaab", b"aaaa("], b"aaaa")
def test_finds_what_a_plain_search_finds(words, data):
    expected = any(data.find(word) >= 0 for word in words)

    assert prefilter.any_of(words)(data) == expected


def test_no_words_are_never_found():
    assert not prefilter.any_of([])(b"import jax")


@pytest.mark.parametrize(
    ("text", "internal"),
    [
        ("from jax._src import core\nimport functools, os\nx = core.pmap\n", False),
        ("from jax._src import core\nimport functools\nimport numpy as np\n", True),
        ("import jax._src.core as core\n", True),
        ("import jax._src.core, jax\n", False),
        ("from jax._src import core\n    from jax import lax\n", False),
        ("from jax._src import core\nfrom mine import pmap\n", False),
        ("from jax._src import core\nfrom . import mine\n", False),
        ('"""of jax._src\nfrom many places\n"""\nfrom jax._src import core\n', True),
        ('{"source": ["from jax._src import core\\n", "import jax\\n"]}', False),  # a notebook
        ("# not jax._src\n", False),
    ],
)
def test_files_that_see_private_modules_only(text, internal):
    assert prefilter.is_internal(text.encode()) == internal
