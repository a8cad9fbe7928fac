"""The seal of a cache entry: which program it holds, with a checksum, at the end of its file.

Without it, a file under a wrong name runs in place of another program: a key is the name of the
file and nothing else. The seal is what zstd calls a skippable frame, and zlib ignores what comes
after its end, so JAX without this library reads sealed entries too. It says nothing about who wrote
the entry: it guards against mistakes, not against somebody who means harm.

Nothing here loads JAX.
"""

import hashlib
import json
import struct
from typing import NamedTuple

from jax_dist import _notes

_FRAME = struct.Struct("<II")  # of zstd: one of the numbers of skippable frames, and the length
_SKIPPABLE = 0x184D2A5D
_END = struct.Struct("<I8s")  # the length again, and the name: the seal is found from its end
_NAME = b"jax_dist"
LONGEST = 1 << 16  # bytes of a seal


class Seal(NamedTuple):
    """What an entry says of itself."""

    key: str
    sha256: str  # of the entry without its seal
    rank: int  # of the process that wrote it
    run: str  # one name for each process that runs


class Opened(NamedTuple):
    """An entry without its seal."""

    content: bytes
    seal: Seal | None  # None: JAX alone wrote it, or the seal is damaged

    def fault(self, key: str) -> str | None:
        """Why this is not the entry of `key`, as far as the seal tells."""
        if self.seal is None:
            return None
        if self.seal.key != key:
            return f"that of {self.seal.key}, under another name"
        if hashlib.sha256(self.content).hexdigest() != self.seal.sha256:
            return "damaged (other bytes than were written)"
        return None


def sealed(key: str, content: bytes, *, rank: int, run: str) -> bytes:
    """An entry with its seal."""
    seal = Seal(key, hashlib.sha256(content).hexdigest(), rank, run)
    text = json.dumps(seal._asdict()).encode()
    length = len(text) + _END.size
    return content + _FRAME.pack(_SKIPPABLE, length) + text + _END.pack(length, _NAME)


def opened(data: bytes) -> Opened:
    """An entry, or the end of one, apart from its seal.

    >>> opened(sealed("jit_f-1", b"program", rank=0, run="7")).fault("jit_g-1")
    'that of jit_f-1, under another name'
    """
    if len(data) >= _FRAME.size + _END.size:
        length, name = _END.unpack_from(data, len(data) - _END.size)
        start = len(data) - length - _FRAME.size
        if (
            name == _NAME
            and length <= LONGEST
            and start >= 0
            and _FRAME.unpack_from(data, start) == (_SKIPPABLE, length)
        ):
            text = data[start + _FRAME.size : -_END.size]
            return Opened(data[:start], _notes.parse(text, Seal))
    return Opened(data, None)
