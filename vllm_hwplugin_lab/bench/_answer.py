# SPDX-License-Identifier: Apache-2.0
"""The child's half of the pipe to ``launch``: one JSON line an event, there as soon as it was said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Answer:
    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def say(self, event: str, **facts: Any) -> None:
        self._file.write(json.dumps({"event": event, **facts}) + "\n")
        self._file.flush()
