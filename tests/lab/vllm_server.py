"""A small HTTP server with the pages of ``vllm serve`` that ``bench serve --url`` reads."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Stand:
    """What the server is, and what it has counted.

    Attributes:
        version: of vLLM; None: an old server without the page.
        drafted: tokens a step; None: a server without speculation.
        plugin: outcome -> share of 100 steps that each request takes; None: no counter of the plugin.
        cpu: seconds that the process computes for each request; None: no counter of them.
        seconds: of each answer.
        answers: whether requests get any.
    """

    version: str | None = "0.31.0"
    drafted: int | None = 3
    plugin: dict[str, int] | None = None
    cpu: float | None = None
    seconds: float = 0.0
    answers: bool = True
    requests: int = 0
    url: str = ""

    def metrics(self) -> str:
        labels = 'engine="0",model_name="chat"'
        lines = [
            "# TYPE vllm:cache_config_info gauge",
            f'vllm:cache_config_info{{{labels},enable_prefix_caching="False",gpu_memory_utilization="0.9"}} 1.0',
            "# TYPE vllm:request_queue_time_seconds histogram",
            f"vllm:request_queue_time_seconds_count{{{labels}}} {self.requests}",
            f"vllm:request_queue_time_seconds_sum{{{labels}}} 0.0",
        ]
        if self.drafted is not None:
            lines += [
                "# TYPE vllm:spec_decode_num_drafts counter",
                f"vllm:spec_decode_num_drafts_total{{{labels}}} {self.requests}",
                "# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter",
                *(
                    f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{at}"}} {self.requests}'
                    for at in range(self.drafted)
                ),
            ]
        if self.cpu is not None:
            lines += ["# TYPE process_cpu_seconds counter", f"process_cpu_seconds_total {7 + self.cpu * self.requests}"]
        if self.plugin is not None:
            lines.append("# TYPE vllm:hwplugin_steps counter")
            for outcome, steps in self.plugin.items():
                path = f'feature="v2-tail-graph",part="drafting",outcome="{outcome}"'
                # Of before the run, too.
                lines.append(f"vllm:hwplugin_steps_total{{{labels},{path}}} {1000 + steps * self.requests}")
        return "\n".join([*lines, ""])


@contextmanager
def serving(stand: Stand) -> Iterator[Stand]:
    """Serve until the block is left; ``url`` of the stand says where."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            pages = {
                "/health": "",
                "/v1/models": json.dumps({"data": [{"id": "chat", "root": "/models/llama"}]}),
                "/metrics": stand.metrics(),
            }
            if stand.version is not None:
                pages["/version"] = json.dumps({"version": stand.version})
            self.send_response(200 if self.path in pages else 404)
            self.end_headers()
            self.wfile.write(pages.get(self.path, "").encode())

        def log_message(self, *words: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        stand.url = f"http://127.0.0.1:{server.server_port}"
        yield stand
        server.shutdown()
