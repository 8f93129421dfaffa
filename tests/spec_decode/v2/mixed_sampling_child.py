# SPDX-License-Identifier: Apache-2.0
"""How a released vLLM samples for a batch with prompts, as it is and where a decode graph has its rows:
`python -m tests.spec_decode.v2.mixed_sampling_child TEXTS` prints it.

A process of its own: TRITON_INTERPRET has to be set before Triton is imported.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from tests.interpreter import save_time
from tests.released import Modules
from vllm_hwplugin.spec_decode.v2.tail_buffers import LogitsRows, TailBuffers

# Of the vocabulary the kernels take 8192 tokens at a time.
VOCAB, DRAFTS, MAX_REQS, LENGTH = 8192 + 300, 3, 12, 64
FREE_ROW = 11
#: Tokens of each request, and how many of them drafts: decodes with all drafts and with fewer, the end of a prompt, a
#: part of one, and a decode without drafts.
BATCH = [(4, 3), (4, 3), (2, 1), (5, 0), (6, 0), (1, 0)]
ROWS = [7, 2, 5, 3, 10, 1]
PROMPT, CHUNK = 3, 4
#: Rows of logits at a time: all, those of two requests, and those of one.
CHUNKS = (1 << 10, 8, 4)


def modules_of(texts: Mapping[str, str]) -> Modules:
    """By their texts. What else they import of vLLM is not reached."""
    given = {"vllm.triton_utils": {"triton": triton, "tl": tl, "tldevice": libdevice, "HAS_TRITON": True}}
    names = {f"{name.replace('.', '/')}.py": name for name in texts}
    return Modules(lambda path: texts[names[path]] if path in names else None, texts, given=given, installed=False)


class States:
    """What vLLM holds of requests, with those of `BATCH` as they are before a step."""

    def __init__(self, count: int, temperature: float, chance: torch.Generator) -> None:
        def drawn(most: int, *shape: int) -> torch.Tensor:
            return torch.randint(most, shape, generator=chance)

        self.computed = 20 + drawn(20, MAX_REQS).int()
        self.last_sampled, self.total_len = drawn(VOCAB, MAX_REQS, 1), self.computed + 1
        self.token_ids = drawn(VOCAB, MAX_REQS, LENGTH).int()
        self.drafts = drawn(VOCAB, MAX_REQS, DRAFTS)
        self.prefill_len = self.computed.clone() - 5
        for place, left in ((PROMPT, 0), (CHUNK, 3)):
            if place < count:
                self.prefill_len[ROWS[place]] = self.computed[ROWS[place]] + BATCH[place][0] + left
        # Nothing may come of the row of padding.
        self.prefill_len[FREE_ROW] = 0
        self.temperature = torch.full((MAX_REQS,), temperature)
        self.temperature[[2, 3]] = 0.0
        self.seeds = drawn(1 << 40, MAX_REQS)

    def copies(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in vars(self).items()}


class Batch:
    """vLLM's tensors of the first `count` requests of `BATCH`, which its own kernels make."""

    def __init__(self, modules: Modules, states: States, count: int) -> None:
        made = modules("vllm.v1.worker.gpu.input_batch")
        tokens, drafts = (np.array(values[:count]) for values in zip(*BATCH, strict=True))
        self.num_logits, self.ends = drafts + 1, tokens.cumsum()
        self.rows = torch.tensor(ROWS[:count], dtype=torch.int32)
        self.starts, self.cu_num_logits = (
            torch.from_numpy(np.concatenate(([0], one.cumsum()))).int() for one in (tokens, self.num_logits)
        )
        total = int(self.num_logits.sum())
        self.expanded, self.local_pos = made.expand_idx_mapping(self.rows, total, self.cu_num_logits, 1 + DRAFTS)
        self.seq_lens = torch.zeros(MAX_REQS, dtype=torch.int32)
        self.input_ids, self.positions = (torch.zeros(int(self.ends[-1]), dtype=torch.int64) for _ in range(2))
        made.prepare_pos_seq_lens(self.rows, self.starts, states.computed, self.positions, self.seq_lens)
        self.logits_indices = made.combine_sampled_and_draft_tokens(
            *(self.input_ids, self.rows, states.last_sampled, self.starts, self.seq_lens, states.prefill_len),
            *(states.drafts, self.cu_num_logits, total),
        )


def verified(modules: Modules, batch: Any, states: Mapping[str, torch.Tensor], **given: Any) -> list[torch.Tensor]:
    """Sampled tokens, their number and that of rejected drafts, by vLLM's rejection sampler."""
    made = modules("vllm.v1.worker.gpu.input_batch")
    sampler = modules("vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils")
    tokens, num_sampled = sampler.rejection_sample(
        draft_sampled=batch.input_ids[batch.logits_indices],
        cu_num_logits=batch.cu_num_logits,
        pos=batch.positions[batch.logits_indices],
        idx_mapping=batch.rows,
        expanded_idx_mapping=batch.expanded,
        expanded_local_pos=batch.local_pos,
        temperature=states["temperature"],
        seed=states["seeds"],
        num_speculative_steps=DRAFTS,
        **given,
    )
    num_sampled, num_rejected = made.get_num_sampled_and_rejected(
        num_sampled, batch.seq_lens, batch.cu_num_logits, batch.rows, states["prefill_len"]
    )
    return [tokens, num_sampled, num_rejected]


def sampled(
    modules: Modules,
    chunks: Sequence[Any],
    states: Mapping[str, torch.Tensor],
    alive: torch.Tensor,
    starts: torch.Tensor,
    count: int,
    **given: Any,
) -> dict[str, Any]:
    """What vLLM samples for the chunks of a batch, and the state of all requests after it."""
    made = modules("vllm.v1.worker.gpu.input_batch")
    logits = given.pop("logits")
    parts = [verified(modules, chunk, states, target_logits=logits[chunk.hidden_rows], **given) for chunk in chunks]
    tokens, num_sampled, num_rejected = (torch.cat(part) for part in zip(*parts, strict=True))
    made.post_update(
        *(alive, states["computed"], states["last_sampled"], None, tokens, num_sampled, num_rejected, starts),
        *(states["token_ids"], states["total_len"]),
    )
    counts = num_sampled[:count].tolist()
    return {
        "tokens": [row[:some] for row, some in zip(tokens.tolist(), counts, strict=False)],
        "num_rejected": num_rejected[:count].tolist(),
        "states": {name: value.tolist() for name, value in states.items()},
    }


def in_graph(batch: Batch, states: States, num_reqs: int, gathered: bool, chunk_rows: int) -> SimpleNamespace:
    """The same batch as a decode graph of `num_reqs` requests has it, which samples `chunk_rows` rows at a time."""
    fixed = {
        name: SimpleNamespace(np=getattr(states, name).numpy(), gpu=getattr(states, name))
        for name in ("temperature", "seeds", "prefill_len")
    }
    more = dict.fromkeys(("top_k", "top_p"), fixed["temperature"])
    prefill_len = fixed.pop("prefill_len")
    runner = SimpleNamespace(
        device=torch.device("cpu"),
        sampler=SimpleNamespace(sampling_states=SimpleNamespace(**fixed, **more)),
        req_states=SimpleNamespace(prefill_len=prefill_len),
    )
    width = 1 + DRAFTS
    buffers = TailBuffers(runner, num_reqs + 1, width, torch.int32, chunk_rows)
    buffers.write(batch.rows.numpy(), FREE_ROW, width, LogitsRows(batch.num_logits, batch.ends, gathered))
    starts = torch.full((num_reqs + 1,), int(batch.ends[-1]), dtype=torch.int32)
    starts[: len(batch.starts)] = batch.starts
    chunks = []
    for first in range(0, num_reqs, buffers.chunk_reqs(width)):
        end = min(first + buffers.chunk_reqs(width), num_reqs)
        rows, cu_num_logits = slice(first * width, end * width), buffers.cu_num_logits[first : end + 1]
        chunks.append(
            SimpleNamespace(
                rows=buffers.idx_mapping(end)[first:],
                cu_num_logits=cu_num_logits - cu_num_logits[0],
                expanded=buffers.expanded_idx_mapping[rows],
                local_pos=buffers.local_pos[rows],
                logits_indices=buffers.logits_indices[rows],
                hidden_rows=buffers.hidden_rows[rows],
                seq_lens=batch.seq_lens[first:],
                input_ids=batch.input_ids,
                positions=batch.positions,
            )
        )
    return SimpleNamespace(chunks=chunks, alive=buffers.idx_mapping_alive(num_reqs), starts=starts)


def main(path: Path) -> None:
    save_time()
    # The interpreter has none of its functions.
    libdevice.log1p = lambda value: tl.log(1 + value)
    torch.Tensor.pin_memory = lambda self: self.clone()  # type: ignore[method-assign, assignment]
    modules = modules_of(json.loads(path.read_text()))
    known = inspect.signature(modules("vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils").rejection_sample)
    answers = []
    for number, (count, num_reqs, temperature, more) in enumerate(
        [
            (6, 6, 0.0, {}),
            (5, 6, 0.7, {"draft_logits": True}),
            (4, 6, 1.0, {}),
            (6, 7, 1.0, {"draft_logits": True, "use_block_verification": True}),
            (3, 4, 1.0, {"synthetic_conditional_rates": torch.tensor([0.9, 0.5, 0.4])}),
        ]
    ):
        if not known.parameters.keys() >= more.keys():
            continue
        chance = torch.Generator().manual_seed(number)
        states = States(count, temperature, chance)
        logits = 2 * torch.randn(sum(tokens for tokens, _ in BATCH), VOCAB, generator=chance)
        drafted = 2 * torch.randn(MAX_REQS, DRAFTS, VOCAB, generator=chance) if more.get("draft_logits") else None
        # Some drafts are right. The second block of the vocabulary has some of the best tokens.
        for place in range(count):
            (ends, row), drafts = (int(sum(one for one, _ in BATCH[: place + 1])), ROWS[place]), BATCH[place][1]
            for draft in range(drafts - 1 if place == 1 else drafts):
                states.drafts[row, draft] = best = 8200 + 7 * draft + place
                logits[ends - 1 - drafts + draft, best] = 20
                if drafted is not None:
                    drafted[row, draft, best] = 20
        batch = Batch(modules, states, count)
        given = {**more, "draft_logits": drafted, "count": count}
        batch.hidden_rows = batch.logits_indices
        stock = sampled(modules, [batch], states.copies(), batch.rows, batch.starts, logits=logits, **given)
        gathered = number % 2 == 0
        graphs = [in_graph(batch, states, num_reqs, gathered, chunk_rows) for chunk_rows in CHUNKS]
        if gathered:
            # Behind them is what another step left.
            found = torch.randn(num_reqs * (1 + DRAFTS), VOCAB, generator=chance)
            found[: len(batch.logits_indices)] = logits[batch.logits_indices]
            logits = found
        answers.append(
            {
                "stock": stock,
                "graphs": [
                    sampled(modules, one.chunks, states.copies(), one.alive, one.starts, logits=logits, **given)
                    for one in graphs
                ],
                "before": states.computed.tolist(),
            }
        )
    print(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
