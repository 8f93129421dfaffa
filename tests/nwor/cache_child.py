# SPDX-License-Identifier: Apache-2.0
"""Engines in this process under a load, each stepped by hand; each block of their KV caches is hashed after each step.

`python -m tests.nwor.cache_child JOBS FOUND`

A job may have an oracle: how many drafts of each request will be rejected in each step, which another job of the same
load finds, here or in another process. Their slots are then taken before the target's forward pass, so nothing ever
writes them; vLLM itself does the rest. With `zeros` its own attention layers write zeros there.
"""

import hashlib
import importlib.util
import json
import sys
import time
from pathlib import Path
from unittest import mock

from tests.musa_sim.load_child import collect_seldom, known, leave_out_step5, name_of, serve

#: Seconds for another process to start its engine and serve its load.
PATIENCE = 300


def layers_of(runner) -> dict:
    """The attention layers of the target and of the drafter, by name."""
    target = {id(module) for module in runner.get_model().modules()}
    layers = runner.vllm_config.compilation_config.static_forward_context
    named = {name: layers[name] for group in runner.kv_cache_config.kv_cache_groups for name in group.layer_names}
    return {
        "target": {name: layer for name, layer in named.items() if id(layer) in target},
        "drafter": {name: layer for name, layer in named.items() if id(layer) not in target},
    }


def fill(layers: dict) -> None:
    """Finite numbers that differ from byte to byte, so that nothing is restored by chance."""
    import torch

    for layer in layers.values():
        cache = layer.kv_cache
        # As bytes, too: 127 would be a NaN of float8.
        count = torch.arange(cache.numel(), device="cpu").reshape(cache.shape) % 101
        cache.copy_((count / 128.0).to(cache.dtype) if cache.dtype.is_floating_point else count.to(cache.dtype))


def digests(layers: dict, num_blocks: int) -> dict[str, list[str]]:
    """By layer, of each block."""
    return {name: [digest(block) for block in blocks_of(layer, num_blocks)] for name, layer in layers.items()}


def blocks_of(layer, num_blocks: int):
    # An attention kernel may have several blocks of its own for one.
    dimension = next(index for index, size in enumerate(layer.kv_cache.shape) if size % num_blocks == 0)
    return layer.kv_cache.cpu().movedim(dimension, 0)


def digest(block) -> str:
    import torch

    return hashlib.sha256(block.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


class Slots:
    """Takes the slots of rejected drafts before the target's forward pass: neither it nor the drafter writes them."""

    def __init__(self, runner, oracle, zeros: bool) -> None:
        self._runner, self._oracle, self._zeros = runner, list(oracle), zeros
        self._v2 = hasattr(runner, "input_buffers")
        self._taken = []

    def patches(self) -> list:
        runner = self._runner
        before, after = ("prepare_attn", "sample") if self._v2 else ("_model_forward", "_sample")
        prepare, sample = getattr(runner, before), getattr(runner, after)

        def prepared(*args, **kwargs):
            if not self._v2:
                self._take(runner.input_batch.req_ids, runner.query_start_loc.gpu)
                return prepare(*args, **kwargs)
            found = prepare(*args, **kwargs)
            self._take(args[0].req_ids, runner.input_buffers.query_start_loc)
            return found

        def sampled(*args, **kwargs):
            for group, slots in self._taken if self._zeros else ():
                self._write_zeros(group, slots)
            return sample(*args, **kwargs)

        return [mock.patch.object(runner, before, prepared), mock.patch.object(runner, after, sampled)]

    def _take(self, req_ids, starts) -> None:
        # The last step may be one that nobody waits for any more.
        runner, rejected = self._runner, self._oracle.pop(0) if self._oracle else {}
        if self._v2:
            mappings = list(runner.block_tables.slot_mappings)
        else:
            mappings = [table.slot_mapping.gpu for table in runner.input_batch.block_table.block_tables]
        rows = [
            end - 1 - i
            for name, end in zip(req_ids, starts[1:].tolist(), strict=False)
            for i in range(rejected.get(name_of(name), 0))
        ]
        self._taken = [(group, slots[rows].clone()) for group, slots in enumerate(mappings) if rows]
        for slots in mappings:
            slots[rows] = -1

    def _write_zeros(self, group: int, slots) -> None:
        """By the layers' own writers."""
        import torch

        names = self._runner.kv_cache_config.kv_cache_groups[group].layer_names
        for name, layer in layers_of(self._runner)["target"].items():
            if name in names:
                shape = len(slots), layer.num_kv_heads, layer.head_size
                nothing = torch.zeros(shape, dtype=self._runner.dtype, device=slots.device)
                layer.impl.do_kv_cache_update(layer, nothing, nothing, layer.kv_cache, slots)


def rejected_by(job: str, found: Path) -> list:
    """What an oracle has found, as soon as it has."""
    file, end = found / f"{job}.json", time.monotonic() + PATIENCE
    while not file.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{file} is not there after {PATIENCE} s; see the log of the process that writes it")
        time.sleep(0.1)
    return json.loads(file.read_text())["rejected"]


def one(job: dict, found_by_others: Path, others_follow: bool) -> dict:
    from vllm import LLM

    from vllm_hwplugin.base import run_records
    from vllm_hwplugin_lab.bench._inside import model_runner, runner_generation

    if importlib.util.find_spec("torchvision") is None:
        leave_out_step5()
    llm = LLM(**known(job["options"]))
    runner = model_runner(llm)
    found: list[dict] = []
    layers = layers_of(runner)
    for kind in layers.values():
        fill(kind)
    if job["oracle"] is not None:
        for patch in Slots(runner, rejected_by(job["oracle"], found_by_others), job["zeros"]).patches():
            patch.start()
    sample_tokens, num_blocks = runner.sample_tokens, runner.kv_cache_config.num_blocks

    def watched(*args, **kwargs):
        output = sample_tokens(*args, **kwargs)
        found.append({kind: digests(named, num_blocks) for kind, named in layers.items()})
        return output

    with mock.patch.object(runner, "sample_tokens", watched):
        answers, recorder = serve(llm, job["requests"])
    if others_follow:
        # Its worker calls what the first Model Runner V2 does not have.
        if not hasattr(runner, "shutdown"):
            runner.shutdown = lambda: None
        llm.llm_engine.engine_core.shutdown()
    entry = run_records.current()
    return {
        "runner": runner_generation(runner),
        "answers": {name: answer["tokens"] for name, answer in answers.items()},
        "rejected": [rejected_in(step) for step in recorder.steps],
        "preempted": recorder.preempted,
        "digests": found,
        "used": sorted(name for name, use in entry.uses.items() if use["used"]) if entry is not None else [],
        "decisions": entry.decisions if entry is not None else {},
    }


def rejected_in(step: dict) -> dict[str, int]:
    """How many drafts of each request a step has rejected. What was sampled is empty for a request that was aborted."""
    return {
        name: drafts + 1 - len(step["sampled"][name])
        for name, drafts in step["verified"].items()
        if drafts + 1 > len(step["sampled"].get(name, ())) > 0
    }


if __name__ == "__main__":
    collect_seldom()
    jobs, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    for name, job in jobs.items():
        found = json.dumps(one(job, folder, others_follow=name != list(jobs)[-1]))
        # Others wait for the name, and shall find all of it.
        (folder / name).write_text(found)
        (folder / name).rename(folder / f"{name}.json")
