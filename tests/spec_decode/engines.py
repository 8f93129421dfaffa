# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler and a model runner, called as `EngineCore` calls them."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus


class Grammars:
    """vLLM's `StructuredOutputManager` for one grammar: the tokens below a limit, in any order."""

    def __init__(self, limit: int, vocabulary: int) -> None:
        self._limit = limit
        allowed = np.arange(-(-vocabulary // 32) * 32) < limit
        self._mask = np.packbits(allowed, bitorder="little").view(np.int32)

    def grammar_bitmask(self, requests: Any, names: Sequence[str], drafts: dict[str, list[int]]) -> np.ndarray:
        rows = sum(1 + len(drafts.get(name, ())) for name in names)
        return np.tile(self._mask, (rows, 1))

    def validate_tokens(self, request: Any, tokens: list[int]) -> list[int]:
        if not request.use_structured_output:
            return tokens
        fitting = [0 <= token < self._limit for token in tokens]
        return tokens[: (*fitting, False).index(False)]

    def accept_tokens(self, request: Any, tokens: list[int]) -> bool:
        return not request.use_structured_output or self.validate_tokens(request, tokens) == tokens

    def should_advance(self, request: Any) -> bool:
        return False


class Engine:
    """A scheduler and a runner.

    Args:
        config: what both ask of vLLM's `VllmConfig`.
        runner: a `GPUModelRunner` that has its KV cache.
        kv_cache_config: the same.
        vocabulary: of the models.

    Attributes:
        scheduled: the last step's `SchedulerOutput`, and None where there was nothing to schedule.
        batch: its `InputBatch`, where the runner has one for a step and something was to be computed.
        sampled: the tokens of each request that has not been aborted, in the order in which they came.
    """

    def __init__(self, config: Any, runner: Any, kv_cache_config: Any, vocabulary: int) -> None:
        self.runner = runner
        self._asynchronous = config.scheduler_config.async_scheduling
        self._block_size = config.cache_config.block_size
        self._grammars = Grammars(vocabulary // 2, vocabulary)
        kv_cache_utils.init_none_hash(_hashed)
        self._make_scheduler: Any = partial(
            AsyncScheduler if self._asynchronous else Scheduler,
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=self._grammars,
            block_size=self._block_size,
            mm_registry=types.SimpleNamespace(supports_multimodal_inputs=lambda config: False),
        )
        self.restart()

    def restart(self) -> None:
        """Have no requests."""
        self.scheduler: Any = self._make_scheduler()
        # Steps whose output has not been seen.
        self._under_way: deque[tuple[Any, Any]] = deque()
        self.scheduled: Any = None
        self.batch: Any = None
        self.sampled: dict[str, list[int]] = {}

    def add(self, name: str, prompt: Sequence[int], **params: Any) -> None:
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(ignore_eos=True, **params),
            pooling_params=None,
            block_hasher=kv_cache_utils.get_request_block_hasher(self._block_size, _hashed),
        )
        if request.structured_output_request is not None:
            request.structured_output_request.grammar = self._grammars
        self.scheduler.add_request(request)
        self.sampled[name] = []

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def preempt(self) -> None:
        """Take all requests out of the batch and their KV cache from them; they come back."""
        self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def step(self) -> None:
        """`EngineCore.step_with_batch_queue`, or `step` and `post_step`."""
        self.scheduled = self.batch = deferred = None
        if self.scheduler.has_requests():
            scheduled = self.scheduled = self.scheduler.schedule()
            output = self.runner.execute_model(scheduled)
            self.batch = getattr(self.runner.execute_model_state, "input_batch", None)
            runs = scheduled.total_num_scheduled_tokens > 0
            if runs and scheduled.pending_structured_output_tokens:
                deferred = scheduled
            else:
                self._under_way.append((scheduled, self._sample(scheduled) if runs else output))
                if len(self._under_way) < 1 + self._asynchronous and (runs or self.scheduler.has_requests()):
                    return
        if self._under_way:
            self._update(*self._under_way.popleft())
        if deferred is not None:
            drafts = self.runner.take_draft_token_ids()
            if drafts is not None:
                self.scheduler.update_draft_token_ids_in_output(drafts, deferred)
            self._under_way.append((deferred, self._sample(deferred)))

    def _sample(self, scheduled: Any) -> Any:
        return self.runner.sample_tokens(self.scheduler.get_grammar_bitmask(scheduled))

    def _update(self, scheduled: Any, output: Any) -> None:
        output = output.get_output() if hasattr(output, "get_output") else output
        for name, tokens in zip(output.req_ids, output.sampled_token_ids or (), strict=False):
            self.sampled[name].extend(tokens)
        self.scheduler.update_from_output(scheduled, output)
        if not self._asynchronous and scheduled.total_num_scheduled_tokens:
            drafts = self.runner.take_draft_token_ids()
            if drafts is not None:
                self.scheduler.update_draft_token_ids(drafts)


def _hashed(value: Any) -> bytes:
    return repr(value).encode()
