# SPDX-License-Identifier: Apache-2.0
import gc

from .._MUSAC import device as _sim
from ..core.device import synchronize
from ..core.memory import empty_cache
from ..core.stream import Stream, stream


def graph_pool_handle():
    return _sim.new_pool()


def is_current_stream_capturing():
    return _sim.is_current_stream_capturing()


class MUSAGraph:
    """There is no ``keep_graph``, and there are no conditional nodes."""

    def __init__(self):
        self._graph = _sim.Graph()

    def capture_begin(self, pool=None, capture_error_mode="global"):
        self._graph.capture_begin(pool=(0, 0) if pool is None else pool, capture_error_mode=capture_error_mode)

    def capture_end(self):
        self._graph.capture_end()

    def replay(self):
        self._graph.replay()

    def reset(self):
        self._graph.reset()

    def pool(self):
        return self._graph.pool()

    def reinstantiate_graph(self):
        raise NotImplementedError("a tape has no executable")

    def enable_debug_mode(self):
        raise NotImplementedError("a tape has no nodes to show")

    def debug_dump(self, debug_path):
        raise NotImplementedError("a tape has no nodes to show")


class graph:
    default_capture_stream = None

    def __init__(self, musa_graph, pool=None, stream=None, capture_error_mode="global"):
        if type(self).default_capture_stream is None:
            type(self).default_capture_stream = Stream()
        self.pool = pool
        self.capture_stream = stream if stream is not None else type(self).default_capture_stream
        self.musa_graph = musa_graph
        self.capture_error_mode = capture_error_mode

    def __enter__(self):
        synchronize()
        gc.collect()
        empty_cache()
        self._on_stream = stream(self.capture_stream)
        self._on_stream.__enter__()
        self.musa_graph.capture_begin(self.pool, capture_error_mode=self.capture_error_mode)

    def __exit__(self, *error):
        # As torch's and torch_musa's own: where this raises, the stream stays the capture's.
        self.musa_graph.capture_end()
        self._on_stream.__exit__(*error)
