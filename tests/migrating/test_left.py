"""What is left as it is: each refusal, with its whole text.

The file stays byte for byte, and what is said names the line, the reason and what to do.
"""

import ast
from typing import Any, NamedTuple

import pytest

from jax_dist.checker import sources
from jax_dist.checker.project import Project
from jax_dist.migrating import files
from jax_dist.migrating.files import Options
from jax_dist.migrating.outcomes import FileMigration


class Said(NamedTuple):
    line: int
    reason: str
    remedy: str
    detail: str = ""
    has_sketch: bool = False


def _migrated(text: str, to: Any, **options: Any) -> FileMigration:
    return files.migrate(sources.read("a.py", text.encode()), Project(), Options(to=to, **options))


_CASES = [
    pytest.param(
        "jax",
        """\
import jax

mappers = [jax.vmap, jax.pmap]
""",
        Said(
            line=3,
            reason="pmap is passed on as a value, so what it will be given is not known here",
            remedy="Pass a function of your own that does this, or jax_dist.pmap.",
            has_sketch=True,
        ),
        id="a value in a list",
    ),
    pytest.param(
        "jax",
        """\
import jax


def f(g):
    return g(jax.pmap)
""",
        Said(
            line=5,
            reason="pmap is passed on as a value, so what it will be given is not known here",
            remedy="Pass a function of your own that does this, or jax_dist.pmap.",
            has_sketch=True,
        ),
        id="a value given to another function",
    ),
    pytest.param(
        "jax",
        """\
import jax


@jax.pmap(axis_name='i')
def f(x):
    return x
""",
        Said(
            line=4,
            reason="`@jax.pmap(...)` without a function fails at run time",
            remedy="Bind the arguments by partial, then migrate again.",
            has_sketch=True,
        ),
        id="a decorator that is called",
    ),
    pytest.param(
        "jax",
        """\
import jax


@jax.pmap
async def f(x):
    return x
""",
        Said(
            line=4,
            reason="pmap maps no async function",
            remedy="Map the function that it awaits.",
        ),
        id="an async function",
    ),
    pytest.param(
        "jax",
        """\
import jax

f = jax.pmap(axis_name='i')
""",
        Said(
            line=3,
            reason="pmap is called without a function, which fails at run time",
            remedy="Use functools.partial to bind arguments before the function is known.",
        ),
        id="no function",
    ),
    pytest.param(
        "jax",
        """\
import jax


def f(g, **options):
    return jax.pmap(g, **options)
""",
        Said(
            line=5,
            reason="the arguments of pmap come from **kwargs",
            remedy="Write them out at the call, then migrate again.",
        ),
        id="arguments behind two stars",
    ),
    pytest.param(
        "jax",
        """\
import jax


def f(*args):
    return jax.pmap(*args)
""",
        Said(
            line=5,
            reason="the arguments of pmap come from *args",
            remedy="Write them out at the call, then migrate again.",
        ),
        id="arguments behind a star",
    ),
    pytest.param(
        "jax",
        """\
import jax

f = jax.pmap(abs, backend='cpu')
""",
        Said(
            line=3,
            reason="shard_map has nothing like pmap's backend",
            remedy='Give the devices themselves: devices=jax.devices("gpu").',
        ),
        id="a backend",
    ),
    pytest.param(
        "jax",
        """\
import jax

f = jax.pmap(abs, global_arg_shapes=(3,))
""",
        Said(
            line=3,
            reason="shard_map has nothing like pmap's global_arg_shapes",
            remedy="Use jax_dist.pmap, which takes all arguments of jax.pmap.",
        ),
        id="an argument of old",
    ),
    pytest.param(
        "jax",
        """\
import jax


def f(g):
    return jax.pmap(g, axis_size=2, devices=jax.devices())
""",
        Said(
            line=5,
            reason="devices and axis_size are both given",
            remedy="Give the devices that are meant.",
        ),
        id="devices and their number",
    ),
    pytest.param(
        "jax",
        """\
import jax


def f(g, axes):
    return jax.pmap(g, in_axes=axes)
""",
        Said(
            line=5,
            reason="in_axes is not a literal, so the specs cannot be written",
            remedy="Write in_axes out at the call and migrate again, or write the specs by hand.",
            has_sketch=True,
        ),
        id="in_axes that are computed",
    ),
    pytest.param(
        "jax",
        """\
import jax


def f(g, axes):
    return jax.pmap(g, out_axes=axes)
""",
        Said(
            line=5,
            reason="out_axes is not a literal, so the specs cannot be written",
            remedy="Write out_axes out at the call and migrate again, or write the specs by hand.",
            has_sketch=True,
        ),
        id="out_axes that are computed",
    ),
    pytest.param(
        "jax",
        """\
import jax


def f(g):
    return jax.pmap(g, in_axes=(0, -1))
""",
        Said(
            line=5,
            reason="in_axes counts from the end, and a PartitionSpec from the front",
            remedy="Give in_axes without a minus; the rank of the array says which.",
        ),
        id="in_axes from the end",
    ),
    pytest.param(
        "jax",
        """\
import jax


def f(g):
    return jax.pmap(g, out_axes=-1)
""",
        Said(
            line=5,
            reason="out_axes counts from the end, and a PartitionSpec from the front",
            remedy="Give out_axes without a minus; the rank of the array says which.",
        ),
        id="out_axes from the end",
    ),
    pytest.param(
        "jax",
        """\
import jax


def f(g, names):
    return jax.pmap(g, static_broadcasted_argnums=tuple(range(len(names))))
""",
        Said(
            line=5,
            reason="static_broadcasted_argnums is not a literal",
            remedy="Write the positions of static_broadcasted_argnums out, then migrate again.",
        ),
        id="static arguments that are computed",
    ),
    pytest.param(
        "jax",
        """\
import jax


def f(g):
    return jax.pmap(g, static_broadcasted_argnums=-1)
""",
        Said(
            line=5,
            reason="static_broadcasted_argnums counts from the end",
            remedy="Count from the front.",
        ),
        id="static arguments from the end",
    ),
    pytest.param(
        "jax",
        """\
import jax


def f(g):
    return jax.pmap(g, in_axes=(None,), static_broadcasted_argnums=0)
""",
        Said(
            line=5,
            reason="in_axes maps static arguments only",
            remedy="Call the function itself: no argument differs between the devices.",
        ),
        id="nothing but static arguments",
    ),
    pytest.param(
        "jax",
        """\
import jax


def f(g, x):
    return jax.pmap(g, static_broadcasted_argnums=0)(3, x=x)
""",
        Said(
            line=5,
            reason="the mapped function is called with named arguments, and has static arguments",
            remedy="Pass all arguments by position, then migrate again.",
        ),
        id="named and static arguments",
    ),
    pytest.param(
        "jax",
        """\
import jax


def f(g, xs):
    for x in xs:
        jax.pmap(g)(x)
""",
        Said(
            line=6,
            reason=(
                "the function is mapped and called at once in a loop: jax.pmap compiles it once, "
                "and a new jax.jit would in each round"
            ),
            remedy="Bind the mapped function to a name above the loop, then migrate again.",
            detail="the loop in line 5",
            has_sketch=True,
        ),
        id="mapped at once in a loop",
    ),
    pytest.param(
        "jax",
        """\
import jax


def per_device(x):
    return x


def f(g):
    return jax.pmap(g)
""",
        Said(
            line=9,
            reason="the file has its own per_device, the name of a function that would be added",
            remedy="Rename per_device, then migrate again.",
        ),
        id="the name of an added function is taken",
    ),
    pytest.param(
        "jax",
        """\
import jax


def f(g, per_device):
    return jax.pmap(g)
""",
        Said(
            line=5,
            reason="per_device is a local name here, and also that of a function to be added",
            remedy="Rename per_device, then migrate again.",
        ),
        id="the name of an added function is taken locally",
    ),
    pytest.param(
        "jax",
        """\
import jax
import numpy as jnp


def f(g):
    return jax.pmap(g), jnp
""",
        Said(
            line=6,
            reason="the name jnp means something else in this file than jax.numpy",
            remedy="Import jax.numpy as jnp, then migrate again.",
        ),
        id="the name of an import is taken",
    ),
    pytest.param(
        "jax",
        """\
import jax

p = jax.pmap
""",
        Said(
            line=3,
            reason=(
                "only the name is given here; what is applied under it is migrated where it stands"
            ),
            remedy="Delete the alias once nothing uses it.",
        ),
        id="a second name",
    ),
    pytest.param(
        "jax",
        """\
import jax


def train(data):
    shard = data[jax.process_index() :: 2]
    return jax.pmap(lambda x: x)(shard)
""",
        Said(
            line=6,
            reason=(
                "with several processes pmap takes what each process holds, and jit(shard_map) "
                "takes global arrays"
            ),
            remedy=(
                "Use --to jax_dist, which keeps that view, or --one-process if the program never "
                "runs in several; or make the arrays global by hand."
            ),
            detail="jax.process_index in line 5",
            has_sketch=True,
        ),
        id="several processes",
    ),
    pytest.param(
        "jax_dist",
        """\
import jax


def f(g):
    return g is jax.pmap
""",
        Said(
            line=5,
            reason=(
                "pmap is compared, or asked about itself, so another function would answer "
                "differently"
            ),
            remedy="Decide by hand which of the two functions is meant.",
        ),
        id="the function is compared",
    ),
    pytest.param(
        "jax_dist",
        """\
import functools
import jax


@functools.wraps(jax.pmap)
def fake(*args):
    return args
""",
        Said(
            line=5,
            reason=(
                "pmap is compared, or asked about itself, so another function would answer "
                "differently"
            ),
            remedy="Decide by hand which of the two functions is meant.",
        ),
        id="the function is wrapped",
    ),
    pytest.param(
        "jax_dist",
        """\
import jax

kind = type(jax.pmap(lambda x: x))
""",
        Said(
            line=3,
            reason=(
                "pmap is compared, or asked about itself, so another function would answer "
                "differently"
            ),
            remedy="Decide by hand which of the two functions is meant.",
        ),
        id="the type of the result",
    ),
    pytest.param(
        "jax_dist",
        """\
from flax import jax_utils

put = map(jax_utils.replicate, [])
""",
        Said(
            line=3,
            reason="replicate is passed on as a value, without its devices",
            remedy="Pass `lambda x: jax_dist.device_put_replicated(x, jax.local_devices())`.",
        ),
        id="replicate as a value",
    ),
    pytest.param(
        "jax_dist",
        """\
from flax import jax_utils


def f(x):
    return jax_utils.replicate(tree=x)
""",
        Said(
            line=5,
            reason="its first argument is given by name, and has another name in the replacement",
            remedy="Give it by position, then migrate again.",
        ),
        id="an argument given by another name",
    ),
    pytest.param(
        "jax",
        """\
from flax import jax_utils


def f(g):
    return g is jax_utils.replicate
""",
        Said(
            line=5,
            reason="the function itself is compared",
            remedy="Decide by hand which of the two functions is meant.",
        ),
        id="replicate is compared",
    ),
]


@pytest.mark.parametrize(("to", "text", "said"), _CASES)
def test_it_is_left_and_why(to: str, text: str, said: Said):
    found = _migrated(text, to)

    assert found.after == text.encode()
    (place,) = found.outcomes
    assert place.status == "left"
    assert said == Said(
        place.line, place.reason, place.remedy, place.detail, has_sketch=bool(place.sketch)
    )


@pytest.mark.parametrize(("to", "text", "said"), _CASES)
def test_a_sketch_is_python(to: str, text: str, said: Said):
    del said
    (place,) = _migrated(text, to).outcomes

    sketch = place.sketch
    if sketch.startswith("@"):
        sketch += "\ndef f(): ..."
    if sketch.startswith("in_specs="):
        sketch = f"f({sketch}\n)"
    ast.parse(sketch)


@pytest.mark.parametrize(
    "evidence",
    [
        "jax.process_index()",
        "jax.process_count()",
        "data[jax.process_index() :: 2]",
        "jax.experimental.multihost_utils.process_allgather(data)",
        "jax.make_array_from_process_local_data(data, data)",
    ],
)
def test_a_share_that_depends_on_the_process_keeps_pmap(evidence: str):
    text = f"import jax\n\n\ndef run(data):\n    x = {evidence}\n    return jax.pmap(abs)(x)\n"

    assert not _migrated(text, "jax").changed
    assert _migrated(text, "jax", several_processes=False).changed
    assert _migrated(text, "jax_dist").changed


@pytest.mark.parametrize(
    "harmless",
    [
        "if jax.process_index() == 0:\n        print(data)",
        "is_first = jax.process_index() == 0",
        "print(jax.process_index())",
        "logging.info('process %d', jax.process_index())",
        "assert not jax.process_index()",
        "name = f'{jax.process_index()}.txt'",
        "raise ValueError(jax.process_count())",
    ],
)
def test_to_ask_for_the_first_process_or_to_say_which_does_not_matter(harmless: str):
    text = f"import jax\n\n\ndef run(data):\n    {harmless}\n    return jax.pmap(abs)(data)\n"

    assert _migrated(text, "jax").changed


def test_what_another_function_does_with_processes_does_not_matter():
    text = """\
import jax


def load(data):
    return data[jax.process_index()]


def run(data):
    return jax.pmap(abs)(data)
"""

    assert b"jax.shard_map" in _migrated(text, "jax").after


def test_where_one_place_is_left_the_others_are_migrated():
    text = """\
import jax


def build(axes):
    return jax.pmap(abs, in_axes=axes), jax.pmap(abs)
"""

    found = _migrated(text, "jax")

    assert [place.status for place in found.outcomes] == ["left", "done"]
    assert b"return jax.pmap(abs, in_axes=axes), jax.jit(" in found.after


def test_a_fake_that_no_longer_takes_effect_is_said():
    text = "import chex\nimport jax\nf = jax.pmap(abs)\nchex.fake_pmap_and_jit().start()\n"
    said = {}
    for to in ("jax", "jax_dist"):
        found = files.migrate(sources.read("a.py", text.encode()), Project(), Options(to=to))
        said[to] = [(outcome.status, outcome.reason) for outcome in found.outcomes]

    fakes = "chex.fake_pmap_and_jit, which this file uses, no longer replaces it"
    assert said == {"jax": [("done", fakes)], "jax_dist": [("done", "")]}
