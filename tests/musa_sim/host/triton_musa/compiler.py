# SPDX-License-Identifier: Apache-2.0
from triton.backends.compiler import BaseBackend


class MusaBackend(BaseBackend):
    @staticmethod
    def supports_target(target):
        return target.backend == "musa"

    def hash(self):
        raise NotImplementedError("nothing is compiled: set TRITON_INTERPRET=1")

    def parse_options(self, options):
        raise NotImplementedError("nothing is compiled: set TRITON_INTERPRET=1")

    def add_stages(self, stages, options):
        raise NotImplementedError("nothing is compiled: set TRITON_INTERPRET=1")

    def load_dialects(self, context):
        raise NotImplementedError("nothing is compiled: set TRITON_INTERPRET=1")

    def get_module_map(self):
        raise NotImplementedError("nothing is compiled: set TRITON_INTERPRET=1")
