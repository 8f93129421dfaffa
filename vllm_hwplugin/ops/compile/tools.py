# SPDX-License-Identifier: Apache-2.0
"""Where the programs lie that build kernels: one search, for whoever builds and for whoever says what is there."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, get_args

from .spec import ToolchainName

ToolName = Literal[ToolchainName, "ninja", "ccache"]

TOOLS: Final[tuple[ToolName, ...]] = get_args(ToolName)

#: The variables that name a compiler's home, best first, and the place where it is installed by default.
HOMES: Final[Mapping[ToolchainName, tuple[tuple[str, ...], str]]] = {
    "nvcc": (("CUDA_HOME", "CUDA_PATH"), "/usr/local/cuda"),
    "mcc": (("MUSA_HOME", "MUSA_PATH"), "/usr/local/musa"),
}


def find_tool(name: ToolName, environ: Mapping[str, str]) -> str | None:
    """The program's path, None where it is not there.

    A compiler is looked for in the home that a variable names, then on PATH, then in its usual place; ninja on PATH,
    then in the distribution `ninja`, which installs it beside Python; ccache on PATH.
    """
    places = [environ.get("PATH", os.defpath)]
    if name == "nvcc" or name == "mcc":
        variables, usual = HOMES[name]
        named = (environ.get(variable) for variable in variables)
        places = [*(f"{home}/bin" for home in named if home), *places, f"{usual}/bin"]
    found = shutil.which(name, path=os.pathsep.join(places))
    if found is None and name == "ninja":
        try:
            package: Any = importlib.import_module("ninja")
        except ImportError:
            return None
        found = str(Path(package.BIN_DIR) / "ninja")
    return found
