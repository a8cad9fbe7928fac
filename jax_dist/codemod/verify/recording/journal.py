"""What happened at each place, one JSON object a line, on disk as it happens."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

_lock = threading.RLock()
_folder = ""


def open_in(folder: str) -> None:
    """Names the folder; each process has a file of its own there."""
    global _folder
    _folder = folder


def note(place: int, event: str, **more: Any) -> None:
    """Adds a line.

    Args:
      place: the number of the spot.
      event: "ran", "value", "call", "inside", "text" or "trouble".
      **more: what else is to be known of it, in JSON's types.
    """
    line = json.dumps({"place": place, "event": event, **more}) + "\n"
    with _lock, open(os.path.join(_folder, f"places-{os.getpid()}.jsonl"), "a") as file:
        file.write(line)
