# SPDX-License-Identifier: Apache-2.0
"""The requests of a load: prompts of a file or of random tokens, and when each is sent."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from vllm_hwplugin.errors import HwpluginError

#: What the files of known sets hold: MT-Bench (its first turn), HumanEval, GSM8K, Alpaca.
KEYS = ("turns", "prompt", "question", "instruction")


#: A text, a number of random tokens, or token ids.
Prompt = str | int | tuple[int, ...]


class PromptsUnreadable(HwpluginError):
    """A prompts file is not there, or holds something else."""


def read_prompts(file: Path, count: int) -> list[str]:
    """The first ``count`` prompts of a file, or all of a shorter one.

    Args:
        file: one JSON object a line, or one array of objects; a name that ends with ``.gz`` is unpacked.
        count: of prompts.

    Raises:
        PromptsUnreadable: the file cannot be read, is no JSON, or an object has none of `KEYS`; says where.
    """
    opened = gzip.open if file.suffix == ".gz" else open
    try:
        with opened(file, "rt", encoding="utf-8") as stream:
            text = stream.read()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise PromptsUnreadable(f"{file}: cannot be read as text ({error}); name a JSONL file") from error
    found: list[str] = []
    for where, record in _records(file, text):
        if len(found) == count:
            break
        found.append(_prompt(f"{file}, {where}", record))
    if not found:
        raise PromptsUnreadable(f"{file}: holds no prompt; expected an object a line with one of {', '.join(KEYS)}")
    return found


def _records(file: Path, text: str) -> Iterator[tuple[str, Any]]:
    try:
        if text.lstrip().startswith("["):
            yield from ((f"entry {number}", record) for number, record in enumerate(json.loads(text), 1))
            return
        number = 0
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield f"line {number}", json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptsUnreadable(f"{file}: no JSON ({error}); expected one object a line, or one array") from error


def _prompt(where: str, record: Any) -> str:
    held = record if isinstance(record, Mapping) else {}
    key = next((name for name in KEYS if name in held), None)
    value = held[key] if key is not None else None
    if key == "turns" and isinstance(value, list) and value:
        value = value[0]
    if not isinstance(value, str):
        keys = ", ".join(map(str, held)) if held else type(record).__name__
        raise PromptsUnreadable(f"{where}: no text under {', '.join(KEYS)}; found {keys}")
    more = held.get("input") if key == "instruction" else None
    return f"{value}\n\n{more}" if more else value


def arrivals(count: int, rate: float | None, seed: int) -> list[float]:
    """The second at which each request is sent, of the first 0.

    Args:
        count: of requests.
        rate: requests a second, with gaps as of a Poisson process; None: all at once. The mean gap is what the rate
            says, as `vllm bench serve` has it: that of some dozens of gaps may be off by a tenth and more.
        seed: same seed, same times.
    """
    if rate is None:
        return [0.0] * count
    dice = random.Random(f"arrivals {seed}")
    times = [0.0, *accumulate(dice.expovariate(rate) for _ in range(count - 1))]
    scale = (count - 1) / rate / times[-1] if count > 1 else 1.0
    return [at * scale for at in times]


def requests_of(prompts: Sequence[Prompt], max_tokens: int, times: Sequence[float]) -> list[dict[str, Any]]:
    """Prompts as the requests of a load."""
    return [{"prompt": one, "max_tokens": max_tokens, "at": at} for one, at in zip(prompts, times, strict=True)]
