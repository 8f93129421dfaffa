# SPDX-License-Identifier: Apache-2.0
"""The shared libraries of a MUSA host, as stubs by the host's compiler: each has the names that the vendor's has.

What is where is read from torch_musa 2.7.1: the current stream is in ``libmusa_python.so`` (its ``shim_musa.cpp``), and
in no library of PyTorch's. ``mcc`` hands the host's compiler what both of them know. Not run on MUSA hardware.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

#: What gives the current stream on MUSA.
GETTER = "aoti_torch_get_current_musa_stream"

#: Library -> its text: of the package torch, of torch_musa and of the toolkit.
STUBS = {
    "torch": {
        "libc10.so": "",
        "libtorch_cpu.so": "int aoti_torch_delete_tensor_object(void* handle) { return 0; }",
        "libtorch.so": "",
    },
    "torch_musa": {
        "libmusa_python.so": f"int {GETTER}(int device, void** stream) "
        "{ *stream = (void*)(0x1000L + device); return 0; }",
    },
    "musa": {"libmusart.so": "int musaGetLastError(void) { return 0; }"},
}

MCC = """#!/bin/sh
if [ "$1" = --version ]; then echo "mcc version 5.1.0"; exit; fi
for word; do
  shift
  if [ "$drop" ]; then drop=; continue; fi
  case $word in
    -mllvm) drop=1 ;;
    --offload-arch=*|-fmusa-*|-mtgpu|-Od3) ;;
    *.mu) set -- "$@" -x c++ "$word" ;;
    *) set -- "$@" "$word" ;;
  esac
done
exec c++ "$@"
"""

_WEAK = re.compile(r'^extern "C" [^;{]*?\b(\w+)\([^;{]*__attribute__\(\(weak\)\);$', re.MULTILINE)


def weak_declarations(text: str) -> dict[str, str]:
    """The functions that a source declares as weak symbols, by name: those that stay null where no library has them."""
    return {match.group(1): match.group() for match in _WEAK.finditer(text)}


def make(root: Path) -> list[Path]:
    """Folders ``torch``, ``torch_musa`` and ``musa`` with the stubs in ``lib``, and mcc in ``musa/bin``.

    Returns:
        The libraries.
    """
    made = []
    for home, libraries in STUBS.items():
        folder = root / home / "lib"
        folder.mkdir(parents=True)
        for name, text in libraries.items():
            source = folder / f"{name}.c"
            source.write_text(text + "\n")
            command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", str(source), "-o", str(folder / name)]
            subprocess.run(command, check=True)
            made.append(folder / name)
    mcc = root / "musa" / "bin" / "mcc"
    mcc.parent.mkdir()
    mcc.write_text(MCC)
    mcc.chmod(0o755)
    return made
