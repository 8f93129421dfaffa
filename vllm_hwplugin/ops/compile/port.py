# SPDX-License-Identifier: Apache-2.0
"""Translate CUDA C++ for mcc, in a copy of a kernel's folders. Not run on MUSA hardware.

The names come from torchada's table, because a MUSA host's PyTorch and its extensions already depend on torchada. Only
the table is taken: torchada's own porting works in place. Rules that the table lacks, for the stable ABI, are below.

The port replaces text, so a name without a rule would stay, and mcc might compile something else. So a copy with a CUDA
name left in it is refused.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .spec import KernelUnavailable, ToolchainName

#: Suffixes of device code for nvcc and mcc; headers keep their names.
CUDA_SUFFIX: Final = ".cu"
MUSA_SUFFIX: Final = ".mu"

_PORTED: Final = (".cu", ".cuh", ".h", ".cpp")

# Matched with its delimiters, because other names contain `cuda.h`.
_TOO_SHORT: Final = ("cuda.h",)

# torchada's rule removes the instructions, and the kernel would silently do less.
_NOT_TAKEN: Final = ("asm volatile",)

_PATTERNS: Final = (
    # The dispatch key and the device type of MUSA's tensors.
    (re.compile(r"(\bSTABLE_TORCH_LIBRARY_IMPL\s*\(\s*\w+\s*,\s*)CUDA\b"), r"\1PrivateUse1"),
    (re.compile(r"\b(\w+)\.is_cuda\(\)"), r"(\1.device().type() == torch::headeronly::DeviceType::PrivateUse1)"),
    # Code for a generation of NVIDIA's GPUs is not for MUSA's: the oldest branch is taken. torchada's table takes the
    # branch of a generation that it considers equal.
    (re.compile(r"\bdefined\s*\(\s*__CUDA_ARCH__\s*\)"), "1"),
    (re.compile(r"\b__CUDA_ARCH__(?=\s*[<>]=?\s*\d)"), "0"),
)

# Messages to users: only in literals, because a CUDA in code is a name that needs a rule.
_LITERAL: Final = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_WORDS: Final = ((re.compile(r"\bCUDA\b"), "MUSA"), (re.compile(r"\bcuda(?=:)"), "musa"))

_COMMENT: Final = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_LEFT: Final = re.compile(
    r"\b(?:cu(?:da)?[A-Z]\w*|cuda\w*|cu(?:u?int\w+_t)|CU_\w+|\w*CUDA\w*|__nv_\w+|nv_\w+|__NV_\w+|\w+_cuda_\w+|is_cuda|asm)\b"
)


@dataclass(frozen=True, slots=True)
class Port:
    """The rules of one build.

    Attributes:
        origin: source of the table, such as ``torchada 0.1.103``.
        table: CUDA text and MUSA text, longest first, so that no rule hides a longer one.
    """

    origin: str
    table: tuple[tuple[str, str], ...]

    @property
    def digest(self) -> str:
        """Digest of everything that decides about the text: part of the key of a build."""
        rules = [*self.table, *((rule.pattern, text) for rule, text in (*_PATTERNS, *_WORDS)), MUSA_SUFFIX]
        return hashlib.sha256(json.dumps(rules).encode()).hexdigest()[:20]

    def text(self, source: str) -> str:
        for pattern, replacement in _PATTERNS:
            source = pattern.sub(replacement, source)
        for old, new in self.table:
            source = source.replace(old, new)
        return _LITERAL.sub(_reword, source)

    def tree(self, folder: Path, target: Path) -> None:
        """Port a folder of ``csrc`` into ``target``, which does not exist yet.

        Raises:
            KernelUnavailable: CUDA names without a rule, all in the message.
        """
        left = []
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            copy = target / path.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix not in _PORTED:
                shutil.copyfile(path, copy)
                continue
            ported = self.text(path.read_text(encoding="utf-8"))
            left += [f"{name} in {path.relative_to(folder)}" for name in left_over(ported)]
            copy = copy.with_suffix(MUSA_SUFFIX) if path.suffix == CUDA_SUFFIX else copy
            copy.write_text(ported, encoding="utf-8")
        if left:
            raise KernelUnavailable(
                f"{folder.name} cannot be ported to MUSA: {self.origin} has no name for {', '.join(left)}"
            )


def left_over(text: str) -> tuple[str, ...]:
    """Return CUDA names and inline assembly in ported code, without comments."""
    return tuple(dict.fromkeys(_LEFT.findall(_COMMENT.sub(" ", text))))


def port_for(toolchain: ToolchainName) -> Port | None:
    """Return the port that a compiler needs, or None."""
    return installed_rules() if toolchain == "mcc" else None


def installed_rules() -> Port:
    """Return the rules of the installed torchada, or raise KernelUnavailable."""
    try:
        torchada: Any = importlib.import_module("torchada")
        rules = dict(importlib.import_module("torchada._mappings").MAPPING_RULE)
    except Exception as error:
        # Another release of torchada may do anything there.
        raise KernelUnavailable(
            f"torchada's table of names cannot be read ({type(error).__name__}: {error}); install torchada, which maps "
            "CUDA names to MUSA"
        ) from error
    return make_port(rules, f"torchada {torchada.__version__}")


def make_port(rules: Mapping[str, str], origin: str) -> Port:
    """Return the port by torchada's rules, without what would be wrong here."""
    rules = dict(rules)
    for header in _TOO_SHORT:
        if (other := rules.pop(header, None)) is not None:
            rules |= {f"<{header}>": f"<{other}>", f'"{header}"': f'"{other}"'}
    table = [(old, new) for old, new in rules.items() if old != new and old not in _NOT_TAKEN]
    return Port(origin, tuple(sorted(table, key=lambda rule: (-len(rule[0]), rule[0]))))


def _reword(literal: re.Match[str]) -> str:
    text = literal.group()
    for pattern, replacement in _WORDS:
        text = pattern.sub(replacement, text)
    return text
