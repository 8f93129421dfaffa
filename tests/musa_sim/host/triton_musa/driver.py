# SPDX-License-Identifier: Apache-2.0
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class MusaDriver(DriverBase):
    @classmethod
    def is_active(cls):
        import torch

        return torch.musa.is_available()

    def map_python_to_cpp_type(self, ty):
        raise NotImplementedError("nothing is compiled: set TRITON_INTERPRET=1")

    def get_current_target(self):
        return GPUTarget("musa", 31, 32)

    def get_active_torch_device(self):
        import torch

        return torch.device("musa", torch.musa.current_device())

    def get_benchmarker(self):
        # A simulated device has no speed, so Triton takes the first of its configurations.
        return lambda function, quantiles=None, **_: [1.0] * len(quantiles or [1])
