"""What a collective costs on a ring of devices: the bytes that each device sends.

`n` is the number of devices that take part, `b` the bytes of the result on one device.
"""

from collections.abc import Callable

_SENT: dict[str, Callable[[float, int], float]] = {
    "all-gather": lambda b, n: b * (n - 1) / n,
    "all-reduce": lambda b, n: b * 2 * (n - 1) / n,
    "all-to-all": lambda b, n: b * (n - 1) / n,
    "collective-permute": lambda b, n: b if n > 1 else 0.0,
    "reduce-scatter": lambda b, n: b * (n - 1),  # of n blocks, each as large as the result
}


def ring_bytes(kind: str, result_bytes: float, size: int) -> float:
    """The bytes that one device sends on a ring, in one call.

    >>> ring_bytes("all-gather", 400, 4), ring_bytes("all-reduce", 100, 4)
    (300.0, 150.0)

    Args:
      kind: as HLO spells it: all-gather, all-reduce, all-to-all, collective-permute or
        reduce-scatter.
      result_bytes: of the result of the collective on one device.
      size: how many devices take part: those of the axes, or of one group.

    Raises:
      ValueError: another kind.
    """
    if kind not in _SENT:
        raise ValueError(f"no collective of the name {kind!r}; there are {', '.join(_SENT)}")
    return float(_SENT[kind](result_bytes, size))
