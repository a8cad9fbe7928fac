"""The prefilter finds what a search for each phrase finds."""

import re

import hypothesis
import pytest
from hypothesis import strategies

from jax_dist.lint.engine import linter

_LETTERS = strategies.lists(strategies.sampled_from(b"ab. (\n"), max_size=9).map(bytes)
_PHRASES = strategies.from_regex(rb"\A\*?[ab]{1,2}\*?([. (]\*?[ab]\*?)?[ (]?\Z")


def _pattern(phrase: bytes) -> bytes:
    """A phrase as a regular expression: its words whole, but for those with a star."""
    parts = re.findall(rb"[\w*]+|[^\w*]+", phrase)
    return b"".join(map(_part, parts))


def _part(part: bytes) -> bytes:
    if not part.strip(b"*").isalnum():
        return re.escape(part)
    start = b"" if part.startswith(b"*") else rb"\b"
    return start + part.strip(b"*") + (b"" if part.endswith(b"*") else rb"\b")


@hypothesis.given(_PHRASES, strategies.lists(_LETTERS, max_size=4).map(b"".join))
@hypothesis.example(b"*ab", b"aab b")
@hypothesis.example(b"*ab", b"aba")
@hypothesis.example(b"ab*", b"aab")
@hypothesis.example(b"a.b", b"a.bb a b")
def test_finds_what_a_search_finds(phrase, data):
    expected = re.search(_pattern(phrase), data) is not None
    holds = linter.holding(data)(phrase)

    # The words of a phrase may be whole somewhere, and the phrase, or more than it, elsewhere.
    assert holds or not expected
    assert not holds or phrase.replace(b"*", b"") in data
    if re.fullmatch(rb"\w+", phrase):
        assert holds == expected


@pytest.mark.parametrize(
    ("phrase", "holds"),
    [
        (b"pmap", False),
        (b"my_pma*", True),
        (b"*pmap", True),
        (b"*pmap*", True),
        (b"jax.jit", True),
        (b"jax.ji", False),
        (b"jax.ji*", True),
        (b"jit(", True),
        (b"jit (", False),
        (b"import jax as", False),
        (b"next", True),  # in a notebook, where a line ends with these two characters
        (b"nnext", False),
    ],
)
def test_words_are_whole_but_for_stars(phrase, holds):
    data = b'{import jax\nf = jax.jit(my_pmap)\n"g()\\nnext"'

    assert linter.holding(data)(phrase) == holds


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
    assert linter._is_internal(text.encode()) == internal
