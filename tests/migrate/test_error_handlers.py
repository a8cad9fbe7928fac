"""Where something may end an error of sizes, `mapped` stays; where somebody hears of it, not."""

import pathlib
import textwrap

import pytest

from jax_dist.migrate import migration
from jax_dist.migrate.migration import MigrationOptions
from jax_dist.migrate.pmap_facts import Promises
from jax_dist.migrate.results import Form

_ENDED = {
    "a group of errors": ("try:\n    p(1)\nexcept* ValueError:\n    pass", "line 5 would catch"),
    "finally goes on": (
        "for i in range(3):\n    try:\n        p(i)\n    finally:\n        continue",
        "line 7 would end",
    ),
    "finally breaks off": (
        "for i in range(3):\n    try:\n        pass\n    except KeyError:\n        p(i)\n"
        "    finally:\n        if i:\n            break",
        "line 10 would end",
    ),
    "finally returns": (
        "def one(n):\n    try:\n        p(n)\n    finally:\n        return 0",
        "line 7 would end",
    ),
    "a caller": (
        "def one(n):\n    return p(n)\ntry:\n    one(1)\nexcept ValueError:\n    pass",
        "line 7 would catch",
    ),
    "a caller of a method": (
        "class A:\n    def one(self, n):\n        return p(n)\n    def all(self):\n        try:\n"
        "            self.one(1)\n        except ValueError:\n            pass",
        "line 9 would catch",
    ),
    "a caller of a class": (
        "class A:\n    def __init__(self, n):\n        self.x = p(n)\n"
        "try:\n    A(1)\nexcept ValueError:\n    pass",
        "line 8 would catch",
    ),
    "a caller that ends the program with no code": (
        "try:\n    p(1)\nexcept Exception:\n    exit(0)",
        "line 5 would catch",
    ),
    "a future that is dropped": ("def log(n):\n    p(n)\nEX.submit(log, 1)", "line 5 would end"),
    "the function itself": ("EX.submit(p, 1)", "line 3 would end"),
    "by a lambda": ("EX.submit(lambda: p(1))", "line 3 would end"),
    "by a lambda with a name": ("log = lambda: p(1)\nEX.submit(log)", "line 4 would end"),
    "dropped, though another one is asked": (
        "EX.submit(p, 1)\nEX.submit(abs, 1).result()",
        "line 3 would end",
    ),
    "futures that are waited for": (
        "def log(n):\n    p(n)\nwait([EX.submit(log, n) for n in range(3)])",
        "line 5 would end",
    ),
    "results that nobody takes": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor() as ex:\n    ex.map(p, [1])",
        "line 5 would end",
    ),
    "a pool": ("POOL.apply_async(p, (1,))", "line 3 would end"),
    "a task": (
        "async def log(n):\n    p(n)\n"
        "async def main():\n    await wait([create_task(log(n)) for n in range(3)])",
        "line 6 would end",
    ),
    "a thread": (
        "def work():\n    p(1)\nthreading.Thread(target=work).start()",
        "line 5 would end",
    ),
    "a thread's method": (
        "class Loop(threading.Thread):\n    def run(self):\n        p(1)",
        "line 4 would end",
    ),
    "a process": ("m.Process(target=partial(p, 1)).start()", "line 3 would end"),
    "a thread by a function": (
        "def start(fun):\n    threading.Thread(target=fun).start()\nstart(p)",
        "line 5 would end",
    ),
    "a thread by a function of a function": (
        "def start(n, fun):\n    def work():\n        fun(n)\n    Thread(target=work).start()\n"
        "start(1, p)",
        "line 7 would end",
    ),
    "a thread of an object": (
        "class Loop:\n    def __init__(self, fun):\n        self.fun = partial(fun, 1)\n"
        "    def work(self):\n        self.fun()\n"
        "    def start(self):\n        Thread(target=self.work).start()\nLoop(fun=p).start()",
        "line 10 would end",
    ),
    "an object that is a thread": (
        "class Loop(Thread):\n    pass\nLoop(p)",
        "line 5 would end",
    ),
    "at the end": ("import atexit\natexit.register(p, 1)", "line 4 would end"),
    "a part of a test": (
        "class T(TestCase):\n    def test(self):\n        with self.subTest():\n            p(1)",
        "line 5 would end",
    ),
    "a text for a log": (
        "class Lazy:\n    def __str__(self):\n        return str(p(1))",
        "line 4 would end",
    ),
}
_HEARD = {
    "a thread for something else": (
        "def load():\n    pass\nthreading.Thread(target=load).start()\np(1)"
    ),
    "a thread beside a function that is handed on": (
        "def train(fun):\n    Thread(target=load).start()\n    fun(1)\ntrain(p)"
    ),
    "a thread that gets what it computes": (
        "def save(x):\n    Thread(target=write, args=(x,)).start()\nsave(p(1))"
    ),
    "a future of another parameter": (
        "def train(fun, state):\n    state = fun(state)\n    POOL.submit(save, state)\ntrain(p, 1)"
    ),
    "a thread of an object that loads": (
        "class Loop:\n    def __init__(self, fun, load):\n        self.fun = fun\n"
        "        Thread(target=self.fill).start()\n    def fill(self):\n        pass\n"
        "    def step(self):\n        return self.fun(1)\nLoop(p, 1)"
    ),
    "a future that is asked": "fs = [EX.submit(p, n) for n in range(3)]\n[f.result() for f in fs]",
    "an argument of a future": "EX.submit(abs, p(1))",
    "results that are taken": "print([*EX.map(p, [1])])",
    "a pool that waits": "POOL.map(p, [1])",
    "a task that is awaited": (
        "async def log(n):\n    p(n)\nasync def main():\n    await gather(create_task(log(1)))"
    ),
    "finally with a loop of its own": (
        "try:\n    p(1)\nfinally:\n    for i in range(3):\n        continue"
    ),
    "finally with a function": "try:\n    p(1)\nfinally:\n    f = lambda: 0",
    "an exit with a code": "try:\n    p(1)\nexcept Exception:\n    print()\n    sys.exit(1)",
    "what a caller catches besides": (
        "def one(n):\n    return p(n)\ntry:\n    one(1)\nexcept KeyboardInterrupt:\n    pass"
    ),
    "a text of its own": "class A:\n    def run(self):\n        p(1)",
}


def _place(folder: pathlib.Path, **texts: str):
    """The one place of some files that maps."""
    (folder / "pyproject.toml").touch()
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    found, _ = migration.migrate(
        [str(folder / f"{name}.py") for name in texts],
        MigrationOptions(to="jax", promises=Promises(one_process=True, all_devices=True)),
    )
    (place,) = (each for file in found for each in file.outcomes)
    return place


@pytest.mark.parametrize("case", _ENDED)
def test_what_ends_an_error_keeps_mapped(tmp_path: pathlib.Path, case: str):
    text, said = _ENDED[case]
    place = _place(tmp_path, a=f"import jax\np = jax.pmap(abs)\n{text}\n")

    assert place.reason == f"not jit(shard_map): {said} what it raises of sizes"
    assert place.form is Form.MAPPED


@pytest.mark.parametrize("case", _HEARD)
def test_what_somebody_hears_of_is_jit_of_shard_map(tmp_path: pathlib.Path, case: str):
    place = _place(tmp_path, a=f"import jax\np = jax.pmap(abs)\n{_HEARD[case]}\n")

    assert (place.form, place.reason) == (Form.DIRECT, "")


@pytest.mark.parametrize(
    "use", ["from a import log\nEX.submit(log, 1)\n", "import a\nThread(target=a.log).start()\n"]
)
def test_another_file_may_end_it(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, use: str):
    monkeypatch.chdir(tmp_path)
    text = textwrap.dedent("""\
        import jax

        p = jax.pmap(abs)


        def log(n):
            return p(n)
        """)
    place = _place(tmp_path, a=text, b=use)

    assert place.reason == "not jit(shard_map): b.py:2 would end what it raises of sizes"
