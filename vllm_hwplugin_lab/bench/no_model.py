# SPDX-License-Identifier: Apache-2.0
"""Executor without a model, to measure vLLM's scheduler and API server on a host without a GPU.

    vllm-hwplugin bench serve --shape tiny --method none --concurrency 256 \
        --vllm-arg distributed_executor_backend=vllm_hwplugin_lab.bench.no_model.NoModel \
        --vllm-arg async_scheduling=false
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any, Final

from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import ModelRunnerOutput

#: Seconds of a step: as of a small target with 256 requests on an H200.
STEP: Final = 0.006
#: Tokens repeat after this many; they are words of every vocabulary.
_WORDS: Final = 200


class NoModel(UniProcExecutor):  # type: ignore[misc]
    """Loads the model and calls its worker for everything but a step."""

    def _init_executor(self) -> None:
        super()._init_executor()
        #: Request -> tokens of its prompt.
        self._prompts: dict[str, int] = {}

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Return tokens after `STEP` seconds.

        One for each request whose prompt is computed.
        """
        computed = dict(
            zip(
                scheduler_output.scheduled_cached_reqs.req_ids,
                scheduler_output.scheduled_cached_reqs.num_computed_tokens,
                strict=True,
            )
        )
        for request in scheduler_output.scheduled_new_reqs:
            self._prompts[request.req_id] = len(request.prompt_token_ids)
            computed[request.req_id] = request.num_computed_tokens
        for name in scheduler_output.finished_req_ids:
            self._prompts.pop(name, None)
        ends = {name: computed[name] + new for name, new in scheduler_output.num_scheduled_tokens.items()}
        output = ModelRunnerOutput(
            req_ids=list(ends),
            req_id_to_index={name: row for row, name in enumerate(ends)},
            sampled_token_ids=[[end % _WORDS] if end >= self._prompts[name] else [] for name, end in ends.items()],
        )
        if ends:
            time.sleep(STEP)
        if not non_block:
            return output
        future: Future[Any] = Future()
        future.set_result(output)
        return future
