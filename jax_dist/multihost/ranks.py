"""Ranks in sentences."""

from collections.abc import Sequence


def name_ranks(ranks: Sequence[int]) -> str:
    """The ranks in few words.

    >>> name_ranks([0, 1, 2, 5])
    'ranks 0-2 and 5'
    """
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    texts = [f"{span[0]}-{span[1]}" if len(span) > 1 else str(span[0]) for span in spans]
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {_joined(texts)}"


def do(ranks: Sequence[int], one: str, several: str) -> str:
    """The ranks and their verb.

    >>> do([0, 1], "is", "are")
    'ranks 0-1 are'
    """
    return f"{name_ranks(ranks)} {one if len(ranks) == 1 else several}"


def _joined(texts: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))
