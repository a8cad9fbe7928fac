"""A file that shows what was proved of a migration, and the check of it, which needs no jax.

The check trusts no verdict in the file: it compares the texts of the programs again, counts again,
and reads the migrated files. That the texts are those of the files only a run can show.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jax_dist._usage import counted
from jax_dist.migrate.verify import equivalence, slices

_FORMAT = 1
_PROVED = ("same program", "equal by rules")
_KEYS = ("format", "environment", "command", "files", "places", "counts", "premises", "not covered")
_SIGNATURE = ("before", "after", "sizes", "arguments", "results")
_PREMISES = (
    "the texts are those that the run has traced from the files; only a run can show that again",
    "JAX and XLA treat equal programs alike, under the versions and flags of the environment",
    "where arguments and results lie, and what is donated in the run, was compared at each call",
    "Python code outside of the traced programs is covered by the calls of the run alone",
)


def made(
    places: Iterable[Mapping[str, Any]],
    *,
    command: Iterable[str],
    files: Iterable[tuple[str, bytes, bytes]],
    folder: str,
) -> dict[str, Any]:
    """A certificate.

    Args:
      places: `path`, `line`, `what`, `rung`, `rules`, `calls`, `equal`, `put_back` and
        `signatures` of each; the last are texts as `slices.proof` takes them.
      command: what ran.
      files: the path, and what it held before and holds after, of each that was migrated.
      folder: where the certificate will lie, to which its paths are relative.
    """
    found = [dict(each) for each in places]
    signatures = [each for place in found for each in place["signatures"]]
    environment = signatures[0].get("environment") if signatures else None
    for place in found:
        place["signatures"] = [
            {key: each[key] for key in _SIGNATURE if key in each} for each in place["signatures"]
        ]
    content: dict[str, Any] = {
        "format": _FORMAT,
        "environment": environment,
        "command": list(command),
        "files": [
            {"path": os.path.relpath(path, folder), "before": _digest(old), "after": _digest(new)}
            for path, old, new in files
        ],
        "places": found,
        "counts": _counts(found),
        "premises": list(_PREMISES),
        "not covered": list(_not_covered(found)),
    }
    return {**content, "seal": _seal(content)}


def problems(certificate: Any, folder: Path) -> Iterator[str]:
    """Why a certificate does not hold; nothing where it does.

    Args:
      certificate: as `made` gives it, read from a file that may hold anything.
      folder: where it lies.
    """
    if not isinstance(certificate, dict) or set(certificate) != {*_KEYS, "seal"}:
        yield "it is no certificate of jax-dist"
        return
    if certificate["format"] != _FORMAT:
        yield f"its format is {certificate['format']}; this jax-dist reads {_FORMAT}"
        return
    if certificate["seal"] != _seal({key: certificate[key] for key in _KEYS}):
        yield "it was altered: its content does not have the digest that it was written with"
    for file in certificate["files"]:
        try:
            data = (folder / file["path"]).read_bytes()
        except OSError as error:
            yield f"{file['path']} cannot be read: {error.strerror}"
            continue
        digest = _digest(data)
        if digest != file["after"]:
            now = "what it held before the migration" if digest == file["before"] else "other"
            yield f"{file['path']} does not hold what was certified: it holds {now} text"
    for place in certificate["places"]:
        where = f"{place['path']}:{place['line']}"
        yield from (f"{where}: {problem}" for problem in _problems_of_place(place))
    if certificate["counts"] != _counts(certificate["places"]):
        yield "its counts are not those of its places"
    if certificate["premises"] != list(_PREMISES):
        yield "its premises are not those of such a proof"
    if certificate["not covered"] != list(_not_covered(certificate["places"])):
        yield "its list of what is not covered is not that of its places"


def headline(certificate: Mapping[str, Any]) -> str:
    """What it shows, in one sentence."""
    counts = certificate["counts"]
    proved = sum(counts.get(rung, 0) for rung in _PROVED)
    rest = [f"{number} {rung}" for rung, number in counts.items() if rung not in _PROVED]
    return ", ".join([f"{proved} of {counted(sum(counts.values()), 'place')} proved", *rest])


def _problems_of_place(place: Mapping[str, Any]) -> Iterator[str]:
    rung = place["rung"]
    if rung in (*_PROVED, "replayed") and not (place["calls"] == place["equal"] > 0):
        yield f"{place['equal']} of {place['calls']} calls were equal, and all must be"
    if rung not in _PROVED:
        if place["rules"] or place["signatures"]:
            yield f"it has rules or texts, and is called {rung}"
        return
    if not place["signatures"]:
        yield f"it is called {rung}, and has no texts"
        return
    rules: set[str] = set()
    for signature in place["signatures"]:
        try:
            rules |= set(slices.proof(signature))
        except equivalence.NotProvedError as reason:
            yield f"its programs are not equal: {reason}"
            return
        except (AttributeError, IndexError, KeyError, StopIteration, TypeError, ValueError):
            yield "its texts cannot be read"
            return
    if sorted(rules) != place["rules"]:
        yield f"it needs the rules {sorted(rules)}, and names {place['rules']}"
    if rung != _PROVED[bool(rules)]:
        yield f"it is called {rung}, and is {_PROVED[bool(rules)]}"


def _counts(places: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    return dict(sorted(Counter(place["rung"] for place in places).items()))


def _not_covered(places: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for place in places:
        where = f"{place['path']}:{place['line']} {place['what']}"
        if place["put_back"]:
            yield f"{where}: it stays as it was"
        elif place["rung"] not in (*_PROVED, "replayed"):
            yield f"{where}: {place['rung']}"
        elif place["rung"] == "replayed":
            yield f"{where}: other arguments than those of the run"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _seal(content: Mapping[str, Any]) -> str:
    return _digest(json.dumps(content, sort_keys=True, ensure_ascii=True).encode())
