"""`jax-dist`: puts the subcommands together."""

import argparse
import gc
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn, TextIO

import jax_dist
from jax_dist.cli import terminal
from jax_dist.cli.terminal import Exit, Help

# Loaded by name, and only the one that is asked for: `lint` must not wait for the others.
_COMMANDS = (
    "cache",
    "certificate",
    "doctor",
    "launch",
    "lint",
    "migrate",
    "plan",
    "rule",
)
# What stands behind their -- is a command to run.
_WITH_PROGRAM = (["cache", "verify"], ["launch"], ["migrate"], ["plan"])

_SHELLS = ("bash", "zsh", "fish")

_EPILOG = """\
exit codes: 0 all is well, 1 something was found, 2 the command was invalid

examples:
  jax-dist lint .                               find pmap-era code in files and notebooks
  jax-dist lint --fix .                         apply the safe fixes
  jax-dist migrate src                          show the migration as a diff
  jax-dist migrate --write src                  moves it
  jax-dist plan --on v5e:4x4 -- python train.py   will its step fit there?
  jax-dist cache verify -- python train.py      check that the next run hits the cache
  jax-dist launch -n 2 -- python train.py       two processes, joined as one JAX job
  jax-dist doctor                               check this machine
  JAX_NUM_CPU_DEVICES=8 jax-dist doctor         with 8 simulated devices
"""


def main(
    arguments: Sequence[str] | None = None,
    *,
    out: TextIO | None = None,
    err: TextIO | None = None,
) -> int:
    """Runs one subcommand.

    Args:
      arguments: the command line without the program's name; by default that of the process.
      out: where results are written; by default the standard output.
      err: where messages are written; by default the standard error.

    Returns:
      The exit code.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser(arguments)
    # The streams as they are now, not at import; None where the shell has closed one.
    results = out or sys.stdout or _nowhere()
    messages = err or sys.stderr or _nowhere()
    program: list[str] = []  # `migrate src -- python a.py` is two; argparse knows no such thing
    if "--" in arguments and any(arguments[: len(each)] == each for each in _WITH_PROGRAM):
        cut = arguments.index("--")
        arguments, program = arguments[:cut], arguments[cut + 1 :]
    options = parser.parse_args(arguments)
    options.program = program
    if options.command is None:
        parser.print_help(file=messages)
        return Exit.USAGE
    try:
        os.getcwd()
    except FileNotFoundError:
        print("jax-dist: the current folder is gone; change to one that is there", file=messages)
        return Exit.USAGE
    try:
        code = int(options.run(options, out=results, err=messages))
        results.flush()
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:  # `jax-dist lint | head`
        terminal.silence(results)
        return Exit.USAGE
    except Exception as error:
        _say_fault(options.command, error, messages)
        # Python itself would exit with 1, which says that something was found.
        raise SystemExit(int(Exit.USAGE)) from error
    return code


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")


def program() -> int:
    """`main` in a process of its own: the script `jax-dist`, and `python -m jax_dist`."""
    gc.set_threshold(100_000, 20, 20)  # trees of syntax are many objects, and few are garbage
    code = main()
    if "jax" not in sys.modules:  # whose backends must be taken down in order
        gc.freeze()  # the trees of a large project go with the process
    return code


def _parser(arguments: Sequence[str]) -> "_Parser":
    parser = _Parser(
        prog="jax-dist",
        description=jax_dist.__doc__,
        epilog=_EPILOG,
        formatter_class=Help,
    )
    parser.add_argument("--version", action="version", version=f"jax-dist {jax_dist.__version__}")
    parser.add_argument(
        "--print-completion",
        action=_Completion,
        choices=_SHELLS,
        metavar="SHELL",
        help=f"print the completion of a shell: {', '.join(_SHELLS)}",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    asked = [name for name in _COMMANDS if name in arguments[:1]]
    for name in asked or _COMMANDS:
        import_module(f"jax_dist.cli.{name}").add_parser(commands)
    return parser


_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)$")
_FEW = 2  # commands; an option that more of them have says nothing


class _Parser(argparse.ArgumentParser):
    """Takes options as they are spelled, and says what was meant; its subcommands do the same.

    The start of a name is no option: `lint --write` would be `lint --write-baseline`.
    """

    def __init__(self, *args: Any, meant: Mapping[str, str] | None = None, **others: Any) -> None:
        """`meant`: what to say of options that only other programs have."""
        super().__init__(*args, **{**others, "allow_abbrev": False})
        self._meant = meant or {}
        self._words: Sequence[str] = ()

    def parse_known_args(self, *words: Any, **others: Any) -> Any:
        self._words = [*words[0]]
        options, unknown = super().parse_known_args(*words, **others)
        if unknown:  # here, and not in the parser above, for the usage is that of this one
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        from jax_dist import _usage  # only here: it is rarely needed

        near, unknown = "", self._unknown()
        found = _CHOICE.search(message)
        if found:
            near = _usage.hint(found[1], re.findall(r"[\w.-]+", found[2]), "")
        elif unknown and message.startswith(
            ("the following arguments are", "one of the arguments")
        ):
            message = f"unrecognized arguments: {unknown}"  # what was asked for, and not what lacks
        if unknown and not near and (found or message.startswith("unrecognized")):
            near = self._advice(unknown)
        super().error(f"{message}. {near}" if near else message)

    def options(self) -> list[str]:
        """All that begin with two dashes."""
        return [each for each in self._option_string_actions if each.startswith("--")]

    def subparsers(self) -> "Iterator[tuple[str, _Parser]]":
        """Each subcommand, also of subcommands, by the words that ask for it."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers: dict[str, _Parser] = action.choices
                for parser in parsers.values():
                    yield parser.prog, parser
                    yield from parser.subparsers()

    def _unknown(self) -> str | None:
        """The first option that this parser does not have."""
        runs = any(each.nargs == argparse.REMAINDER for each in self._actions)
        before = ""
        for word in self._words:
            if runs and not word.startswith("-") and not before.startswith("-"):
                return None  # here the command begins, whose options are its own
            name = word.partition("=")[0]
            if not name.startswith("--"):
                name = name[:2]  # `-n2` is `-n 2`
            if re.match(r"--?[a-zA-Z]", name) and name not in self._option_string_actions:
                return name
            before = word
        return None

    def _advice(self, option: str) -> str:
        from jax_dist import _usage

        if option in self._meant:
            return self._meant[option]
        if not option.startswith("--"):
            return self._hint([f"`{each}`" for each in self.options() if each[2] == option[1]])
        own = {each.strip("-"): f"`{each}`" for each in self.options()}
        others = [
            (each.strip("-"), f"`{name} {each}`")
            for name, parser in _parser([]).subparsers()
            for each in parser.options()
            if name != self.prog
        ]
        word = option.strip("-")
        if any(name == f"{self.prog} {word}" for name, _ in self.subparsers()):
            return self._hint([f"`{self.prog} {word}`"])
        same = [said for name, said in others if name == word]
        found = _usage.nearest(word, [*own, *dict(others)])
        near = same if len(same) <= _FEW else []
        if found in own:
            near.append(own[found])
        elif not near and found:
            near.append(dict(others)[found])
        near += [said for name, said in own.items() if word in name.split("-") and said not in near]
        return self._hint(near)

    def _hint(self, near: list[str]) -> str:
        if near:
            return f"Did you mean {' or '.join(near)}?"
        return f"`{self.prog} --help` lists the options."


class _Completion(argparse.Action):
    """Prints and exits, as `--version` does: no subcommand is asked for."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> NoReturn:
        try:
            import shtab
        except ModuleNotFoundError:
            parser.error("shtab is not installed, which writes completions. Run: pip install shtab")
        print(shtab.complete(parser, str(values)))
        parser.exit()


def _say_fault(command: str, error: Exception, err: TextIO) -> None:
    from jax_dist._exceptions import told  # only here: these are rarely needed
    from jax_dist._usage import MisuseError

    if isinstance(error, MisuseError):
        print(f"jax-dist {command}: {error}", file=err)
        return
    err.write(told(error).traceback)
    print(
        f"jax-dist {command}: this is a fault of jax-dist, not of your code. "
        "Please report it with the lines above.",
        file=err,
    )
