# SPDX-License-Identifier: Apache-2.0
"""What GPU tests found, kept for whoever reads a run afterwards."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def keep(case: str, facts: Mapping[str, Any]) -> None:
    """Append a line of JSON to the file that ``HWPLUGIN_TEST_RESULTS`` names; does nothing where it names none."""
    if results := os.environ.get("HWPLUGIN_TEST_RESULTS"):
        with Path(results).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"case": case, **facts}) + "\n")
