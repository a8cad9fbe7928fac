"""Amounts as people read them."""


def human_bytes(amount: float) -> str:
    """In bytes, kB, MB: powers of 1000.

    >>> [human_bytes(amount) for amount in (0, 36, 999.6, 12_345, 999_960, 64e6)]
    ['0 B', '36 B', '1.0 kB', '12.3 kB', '1.0 MB', '64.0 MB']
    """
    if round(amount) < 1000:
        return f"{round(amount)} B"
    for unit in ("kB", "MB", "GB"):
        amount /= 1000
        if round(amount, 1) < 1000:
            return f"{amount:.1f} {unit}"
    return f"{amount / 1000:.1f} TB"
