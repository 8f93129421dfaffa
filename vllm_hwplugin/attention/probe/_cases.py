# SPDX-License-Identifier: Apache-2.0
"""What is tried: the capabilities, and the random batches on which each is run. Pure data, no torch and no vLLM."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

HEAD_SIZES: Final = (8, 16, 32, 40, 64, 72, 80, 96, 112, 120, 128, 160, 192, 224, 256, 320, 384, 448, 512, 576)
NON_CAUSAL_HEAD_SIZES: Final = (256, 512)
DTYPES: Final = ("float16", "bfloat16", "float32")
KV_CACHE_DTYPES: Final = ("float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
BLOCK_SIZES: Final = (8, 16, 32, 48, 64, 128)
GROUPS: Final = (1, 2, 3, 8, 16)

#: In this order over the cases of a trial, from a random one on.
KINDS: Final = ("mixed", "borders", "decode", "prefill", "verify")


@dataclass(frozen=True)
class Request:
    """One row of a batch: ``query`` new tokens behind ``context`` tokens that are in the KV cache."""

    query: int
    context: int

    @property
    def total(self) -> int:
        return self.query + self.context


@dataclass(frozen=True)
class Case:
    """One batch through one attention layer.

    ``padding`` rows without tokens follow the requests, as the model runner pads a batch to the size of a CUDA graph.
    Dtypes are vLLM's names of them.
    """

    requests: tuple[Request, ...]
    dtype: str
    kv_cache_dtype: str
    head_size: int
    num_heads: int
    num_kv_heads: int
    block_size: int
    causal: bool = True
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    padding: int = 0
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(request.query for request in self.requests)

    def __str__(self) -> str:
        """The shape on one line, for a report."""
        rows = " ".join(f"{request.query}+{request.context}" for request in self.requests)
        words = [
            f"requests (query+context) {rows}",
            f"heads {self.num_heads}/{self.num_kv_heads} of {self.head_size}",
            f"{self.dtype}, KV {self.kv_cache_dtype}, blocks of {self.block_size}",
            "causal" if self.causal else "non-causal",
        ]
        if self.sliding_window is not None:
            words.append(f"window {self.sliding_window}")
        if self.softcap is not None:
            words.append(f"softcap {self.softcap}")
        words += [name for name in ("sinks", "alibi") if getattr(self, name)]
        if self.padding:
            words.append(f"{self.padding} padding rows")
        return "; ".join([*words, f"seed {self.seed}"])


@dataclass(frozen=True)
class Plain:
    """What a backend surely does; everything that a trial does not ask for is taken from here."""

    dtype: str
    head_size: int
    block_size: int
    longest: int = 300  # tokens of one request, at most


@dataclass(frozen=True)
class Trial:
    """One value of one capability, and what a `Case` needs for it."""

    capability: str
    value: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        return self.capability, self.value


def trials() -> tuple[Trial, ...]:
    """All that is tried on each backend, the plain batch first."""
    found = [Trial("plain", "causal")]
    found += [Trial("head_size", str(size), {"head_size": size}) for size in HEAD_SIZES]
    found += [Trial("dtype", name, {"dtype": name}) for name in DTYPES]
    for name in KV_CACHE_DTYPES:
        # A cache of another 16-bit type than the model's is not something that vLLM's layers convert to.
        same = {"dtype": name} if name in DTYPES else {}
        found.append(Trial("kv_cache_dtype", name, {"kv_cache_dtype": name, **same}))
    found += [Trial("block_size", str(size), {"block_size": size}) for size in BLOCK_SIZES]
    found.append(Trial("non_causal", "yes", {"causal": False}))
    found += [
        Trial("non_causal_head_size", str(size), {"causal": False, "head_size": size}) for size in NON_CAUSAL_HEAD_SIZES
    ]
    found += [
        Trial("sliding_window", "yes", {"sliding_window": True}),
        Trial("sinks", "yes", {"sinks": True}),
        Trial("softcap", "yes", {"softcap": True}),
        Trial("alibi", "yes", {"alibi": True}),
    ]
    found += [Trial("group", str(size), {"group": size}) for size in GROUPS]
    found.append(Trial("padded_batch", "yes", {"padding": True}))
    return tuple(found)


CAPABILITIES: Final = tuple(dict.fromkeys(trial.capability for trial in trials()))


def draw(trial: Trial, plain: Plain, seed: int, count: int) -> tuple[Case, ...]:
    """Make the random batches of a trial.

    Args:
        trial: what every case asks for.
        plain: the rest.
        seed: same seed, same cases; each case carries one of its own for its tensors.
        count: how many.
    """
    rng = random.Random(f"{seed} {trial.capability} {trial.value}")
    first = rng.randrange(len(KINDS))
    return tuple(_case(trial, plain, rng, KINDS[(first + index) % len(KINDS)]) for index in range(count))


def _case(trial: Trial, plain: Plain, rng: random.Random, kind: str) -> Case:
    settings = dict(trial.settings)
    block_size: int = settings.pop("block_size", plain.block_size)
    group: int = settings.pop("group", rng.choice((1, 2, 4)))
    kv_heads = rng.choice((1, 2, 3)) if group < 8 else rng.choice((1, 2))
    padded = bool(settings.pop("padding", False))
    # Rows of one length each: the batches that vLLM pads, whichever of its graph modes is on.
    requests = _requests("uniform" if padded else kind, rng, block_size, plain.longest)
    if settings.get("sliding_window"):
        window = settings["sliding_window"] = rng.choice((5, block_size, block_size + 3))
        requests = (*requests, Request(rng.choice((1, 4)), 2 * window + rng.randrange(block_size)))
    if settings.get("softcap"):
        # Scores of the inputs have a deviation of 1: a cap far above would change nothing.
        settings["softcap"] = rng.choice((0.5, 1.0, 2.0))
    if not settings.get("causal", True) and all(request.query == 1 for request in requests):
        requests = (*requests, Request(7, rng.randrange(block_size)))
    return Case(
        requests=requests,
        dtype=settings.pop("dtype", plain.dtype),
        kv_cache_dtype=settings.pop("kv_cache_dtype", "auto"),
        head_size=settings.pop("head_size", plain.head_size),
        num_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        block_size=block_size,
        padding=rng.choice((1, 3)) if padded else 0,
        seed=rng.getrandbits(31),
        **settings,
    )


def _requests(kind: str, rng: random.Random, block: int, longest: int) -> tuple[Request, ...]:
    rows = rng.choice((1, 2, 3, 5))
    if kind == "decode":
        return tuple(Request(1, rng.randrange(longest)) for _ in range(rows))
    if kind == "verify":
        return tuple(Request(rng.randint(2, 9), rng.randrange(longest)) for _ in range(rows))
    if kind == "prefill":
        return tuple(Request(rng.randint(1, longest), 0) for _ in range(rows))
    if kind == "uniform":
        query = rng.randint(1, 8)
        return tuple(Request(query, rng.randrange(longest)) for _ in range(rows))
    if kind == "borders":
        return tuple(_at_border(rng, block) for _ in range(rows))
    return (
        Request(1, rng.randrange(1, longest)),
        Request(rng.randint(2, 9), rng.randrange(1, longest)),
        Request(rng.randint(block, 3 * block), rng.randrange(longest)),
        Request(rng.randint(1, longest), 0),
    )


def _at_border(rng: random.Random, block: int) -> Request:
    """A row whose end, or start, lies at a block's border or one token beside it."""
    total = max(1, rng.randint(1, 4) * block + rng.choice((-1, 0, 1)))
    query = min(total, rng.choice((1, 2, block - 1, block, block + 1)))
    return Request(max(1, query), total - max(1, query))


def as_dict(case: Case) -> dict[str, Any]:
    """For a results file; `from_dict` reads it."""
    return {**dataclasses.asdict(case), "requests": [[request.query, request.context] for request in case.requests]}


def from_dict(data: Mapping[str, Any]) -> Case:
    return Case(**{**data, "requests": tuple(Request(*pair) for pair in data["requests"])})


def select(capabilities: Sequence[str]) -> tuple[Trial, ...]:
    """The trials of some capabilities, or all; the plain batch is always among them."""
    return tuple(t for t in trials() if not capabilities or t.capability == "plain" or t.capability in capabilities)
