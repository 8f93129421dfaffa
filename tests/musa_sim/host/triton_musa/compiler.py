# SPDX-License-Identifier: Apache-2.0
from triton.backends.compiler import BaseBackend


class MusaBackend(BaseBackend):
    @staticmethod
    def supports_target(target):
        return target.backend == "musa"

    def _nothing(self, *_):
        raise NotImplementedError("nothing is compiled: set TRITON_INTERPRET=1")

    hash = parse_options = add_stages = load_dialects = get_module_map = _nothing
