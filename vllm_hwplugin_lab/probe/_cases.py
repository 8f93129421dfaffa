# SPDX-License-Identifier: Apache-2.0
"""The capabilities to try, and their random batches. Pure data, without torch and vLLM."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

HEAD_SIZES: Final = (8, 16, 32, 40, 64, 72, 80, 96, 112, 120, 128, 160, 192, 224, 256, 320, 384, 448, 512, 576)
NON_CAUSAL_HEAD_SIZES: Final = (256, 320, 384, 448, 512)
DTYPES: Final = ("float16", "bfloat16", "float32")
KV_CACHE_DTYPES: Final = ("float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
BLOCK_SIZES: Final = (8, 16, 32, 48, 64, 128, 256)
GROUPS: Final = (1, 2, 3, 8, 16)

#: Kinds of batches, in the order of a trial's cases, beginning at a random kind.
KINDS: Final = ("mixed", "borders", "decode", "prefill", "verify")

#: Above this head size other kernels take over on many devices, so every feature is also tried above it.
USUAL_HEAD_SIZE: Final = 256
LARGE_HEAD_SIZE: Final = 512
#: Large heads have few shapes, because kernels are compiled per shape, slowly for large heads.
LARGE_GROUP: Final = 4
LARGE_KINDS: Final = ("mixed", "decode")

#: Fewest and most query tokens of a request whose drafts are verified.
VERIFY: Final = (2, 32)


@dataclass(frozen=True)
class Request:
    """A row of a batch: ``query`` new tokens after ``context`` tokens in the KV cache."""

    query: int
    context: int

    @property
    def total(self) -> int:
        return self.query + self.context


@dataclass(frozen=True)
class Case:
    """A batch through an attention layer.

    Attributes:
        dtype, kv_cache_dtype: vLLM's names.
        sliding_window: Tokens, with the query's own.
        window_ahead: Non-causal: tokens of the window after the query's own; None: all.
        padding: Rows without tokens after the requests, as the model runner pads a batch to the size of a CUDA graph.
        graph: Query tokens of each row of a captured graph. It runs ``requests`` and each of ``replays``, padded to its
            rows.
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
    window_ahead: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    padding: int = 0
    graph: tuple[int, ...] = ()
    replays: tuple[tuple[Request, ...], ...] = ()
    seed: int = 0

    @property
    def rows(self) -> tuple[Request, ...]:
        """The requests, and the padding rows as requests of no tokens."""
        return (*self.requests, *[Request(0, 0)] * self.padding)

    @property
    def num_tokens(self) -> int:
        return sum(request.query for request in self.requests)

    def __str__(self) -> str:
        """Return the shape on one line, for a report."""
        batches = (" ".join(f"{row.query}+{row.context}" for row in rows) for rows in (self.requests, *self.replays))
        words = [
            f"requests (query+context) {', then '.join(batches)}",
            f"heads {self.num_heads}/{self.num_kv_heads} of {self.head_size}",
            f"{self.dtype}, KV {self.kv_cache_dtype}, blocks of {self.block_size}",
            "causal" if self.causal else "non-causal",
        ]
        if self.graph:
            words.append(f"captured with rows of {' '.join(map(str, self.graph))} tokens")
        for name in ("sliding_window", "softcap", "sinks", "alibi", "padding"):
            if getattr(self, name):
                words.append(f"{name} {getattr(self, name)}")
        return "; ".join([*words, f"seed {self.seed}"])


@dataclass(frozen=True)
class Plain:
    """Settings that a backend supports, used for everything that a trial does not set."""

    dtype: str
    head_size: int
    block_size: int
    longest: int = 300  # most tokens of a request
    deepest: int = 300  # longest context of a decode or of drafts to verify


@dataclass(frozen=True)
class Trial:
    """A value of a capability, and its settings of a `Case`."""

    capability: str
    value: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        return self.capability, self.value

    @property
    def is_large(self) -> bool:
        return bool(self.settings.get("head_size", 0) > USUAL_HEAD_SIZE)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the trial's batches."""
        return LARGE_KINDS if self.is_large else KINDS


def trials(capabilities: Sequence[str] = ()) -> tuple[Trial, ...]:
    """Return the trials of some capabilities (empty: all).

    The plain batch is always the first.
    """
    usual: list[tuple[str, str, dict[str, Any]]] = [
        ("plain", "causal", {}),
        *(("head_size", str(size), {"head_size": size}) for size in HEAD_SIZES),
        *(("dtype", name, {"dtype": name}) for name in DTYPES),
        *(("kv_cache_dtype", name, {"kv_cache_dtype": name}) for name in KV_CACHE_DTYPES),
        *(("block_size", str(size), {"block_size": size}) for size in BLOCK_SIZES),
        ("non_causal", "yes", {"causal": False}),
        *(("non_causal_head_size", str(size), {"head_size": size, "causal": False}) for size in NON_CAUSAL_HEAD_SIZES),
        *(("group", str(size), {"group": size}) for size in GROUPS),
    ]
    both: list[tuple[str, str, dict[str, Any]]] = [
        ("sliding_window", "yes", {"sliding_window": True}),
        ("non_causal_window", "yes", {"sliding_window": True, "causal": False}),
        *((name, "yes", {name: True}) for name in ("sinks", "softcap", "alibi")),
        ("padded_batch", "yes", {"padding": True}),
        *(("captured", batch, {"graph": batch}) for batch in ("decode", "verify", "mixed")),
    ]
    large: list[tuple[str, str, dict[str, Any]]] = [
        ("dtype", "float16", {"dtype": "float16"}),
        ("block_size", "64", {"block_size": 64}),
        *(("group", str(size), {"group": size}) for size in (1, 16)),
        *both,
        ("captured", "non-causal verify", {"graph": "verify", "causal": False}),
    ]
    at = f"head size {LARGE_HEAD_SIZE}"
    chosen = [Trial(*fields) for fields in (*usual, *both)]
    for capability, value, settings in large:
        name = at if value == "yes" else f"{value}, {at}"
        chosen.append(Trial(capability, name, settings | {"head_size": LARGE_HEAD_SIZE}))
    return tuple(trial for trial in chosen if not capabilities or trial.capability in ("plain", *capabilities))


CAPABILITIES: Final = tuple(dict.fromkeys(trial.capability for trial in trials()))


def draw(trial: Trial, plain: Plain, seed: int, count: int) -> tuple[Case, ...]:
    """Draw a trial's batches, each with a seed for its tensors."""
    rng = random.Random(f"{seed} {trial.capability} {trial.value}")
    first = rng.randrange(len(trial.kinds))
    return tuple(_case(trial, plain, rng, trial.kinds[(first + index) % len(trial.kinds)]) for index in range(count))


def _case(trial: Trial, plain: Plain, rng: random.Random, kind: str) -> Case:
    settings = dict(trial.settings)
    if settings.get("kv_cache_dtype") in DTYPES:
        # vLLM's layers do not convert to a cache of another 16-bit type than the model's.
        settings["dtype"] = settings["kv_cache_dtype"]
    block_size: int = settings.pop("block_size", plain.block_size)
    group: int = settings.pop("group", LARGE_GROUP if trial.is_large else rng.choice((1, 2, 4)))
    kv_heads = rng.choice((1, 2, 3)) if group < 8 else rng.choice((1, 2))
    if "graph" in settings:
        settings["graph"], (requests, *replays) = _captured(settings["graph"], rng, plain)
        settings["replays"] = tuple(replays)
    else:
        # Rows of equal length: vLLM pads such batches in every graph mode.
        requests = _requests("uniform" if "padding" in settings else kind, rng, block_size, plain)
    if "padding" in settings:
        settings["padding"] = rng.choice((1, 3))
    if "sliding_window" in settings:
        window = settings["sliding_window"] = rng.choice((5, block_size, block_size + 3))
        # Non-causal: also tokens after the query, inside and outside of the window.
        tokens = rng.choice((1, 4)) if settings.get("causal", True) else 2 * window
        requests = (*requests, Request(tokens, 2 * window + rng.randrange(block_size)))
    if "softcap" in settings:
        # Scores have a standard deviation of 1: a cap far above would change nothing.
        settings["softcap"] = rng.choice((0.5, 1.0, 2.0))
    if "causal" in settings and "graph" not in settings and all(request.query == 1 for request in requests):
        requests = (*requests, Request(7, rng.randrange(block_size)))
    rest = {"dtype": plain.dtype, "kv_cache_dtype": "auto", "head_size": plain.head_size, **settings}
    return Case(
        requests,
        num_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        block_size=block_size,
        seed=rng.getrandbits(31),
        **rest,
    )


def _requests(kind: str, rng: random.Random, block: int, plain: Plain) -> tuple[Request, ...]:
    longest, deepest, same = plain.longest, plain.deepest, rng.randint(1, 8)
    rows: dict[str, Callable[[], Request]] = {
        "decode": lambda: Request(1, rng.randrange(deepest)),
        "verify": lambda: Request(_verified(rng), rng.randrange(deepest)),
        "chunk": lambda: Request(rng.randint(block, 3 * block), rng.randrange(1, longest)),
        "prefill": lambda: Request(rng.randint(1, longest), 0),
        "uniform": lambda: Request(same, rng.randrange(longest)),
        "borders": lambda: _at_border(rng, block),
    }
    mixed = ("decode", "verify", "chunk", "prefill")
    return tuple(rows[name]() for name in (mixed if kind == "mixed" else (kind,) * rng.choice((1, 2, 3, 5))))


def _verified(rng: random.Random) -> int:
    """Draw query tokens to verify: mostly up to 9, sometimes more."""
    return rng.randint(VERIFY[0], rng.choice((9, VERIFY[1])))


def _captured(kind: str, rng: random.Random, plain: Plain) -> tuple[tuple[int, ...], list[tuple[Request, ...]]]:
    """Return a graph's rows as captured, and three batches to replay."""

    def batch(*queries: int) -> tuple[Request, ...]:
        return tuple(Request(query, rng.randrange(plain.deepest)) for query in queries)

    if kind == "mixed":
        # One token per row, as the runner captures it, with all tokens as the bound of the longest query.
        tokens = rng.choice((16, 24))
        drafts = [rng.randint(2, 9) for _ in range(3)]
        return (1,) * tokens, [batch(1, few, rng.randint(1, tokens - 1 - few)) for few in drafts]
    query = 1 if kind == "decode" else _verified(rng)
    rows = rng.choice((2, 4, 8))
    # The last batch has no padding rows.
    counts = (rng.randint(1, rows), rng.randint(1, rows), rows)
    return (query,) * rows, [batch(*[query] * count) for count in counts]


def _at_border(rng: random.Random, block: int) -> Request:
    """Return a row that ends or starts near a block's border."""
    total = max(1, rng.randint(1, 4) * block + rng.choice((-1, 0, 1)))
    query = max(1, min(total, rng.choice((1, 2, block - 1, block, block + 1))))
    return Request(query, total - query)
