# SPDX-License-Identifier: Apache-2.0
import torch


def get_amp_supported_dtype():
    return [torch.float16, torch.bfloat16]
