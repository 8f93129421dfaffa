# SPDX-License-Identifier: Apache-2.0
"""A scheduler of vLLM's that drafts another number of tokens in each step."""

from __future__ import annotations

import random
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler


class RandomDrafts(AsyncScheduler):  # type: ignore[misc]  # vLLM is not there where the types are checked
    """Writes the list of draft counts at random before each step."""

    chance = random.Random(0)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        for count in range(1, len(self.dynamic_sd_lookup)):
            self.dynamic_sd_lookup[count] = self.chance.choice((1, 2, 3))
        return super().schedule(*args, **kwargs)
