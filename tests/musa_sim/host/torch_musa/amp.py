# SPDX-License-Identifier: Apache-2.0
import functools

import torch

from .core.amp import get_amp_supported_dtype  # noqa: F401

autocast = functools.partial(torch.amp.autocast, "musa")
