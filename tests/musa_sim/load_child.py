# SPDX-License-Identifier: Apache-2.0
"""Engines in this process, one after the other, each stepped by hand through a load: its requests meet in the same
steps each time.

`python -m tests.musa_sim.load_child LOADS RUNS`
"""

import contextlib
import functools
import gc
import hashlib
import importlib
import importlib.util
import json
import os
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

from . import delta_rule


def load_plugins() -> None:
    """As an engine does, before it imports what they patch."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()


_unfreeze = gc.unfreeze


def leave_out_of_collections() -> None:
    """Have collections of garbage look at what comes from here on alone. An engine's start has two dozen, which take
    most of its time where each goes through all that was imported.
    """
    load_plugins()
    import vllm.v1.worker.gpu_worker  # noqa: F401

    if gc.get_freeze_count():
        # Of the engine before this one.
        _unfreeze()
        gc.collect()
    gc.freeze()
    # vLLM does it behind each capture.
    gc.unfreeze = lambda: None


def sampling_params(asked: dict):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    given = {"ignore_eos": True, "detokenize": False, **asked}
    for name in ("adapter", "image"):
        given.pop(name, None)
    if "structured_outputs" in given:
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    return SamplingParams(**given, output_kind=RequestOutputKind.FINAL_ONLY)


def adapter_of(asked: dict) -> dict:
    from vllm.lora.request import LoRARequest

    path = asked.get("adapter")
    return {} if path is None else {"lora_request": LoRARequest("adapter", 1, path)}


def prompt_of(request: dict) -> dict:
    """As vLLM takes it, with an image of noise where one is asked for."""
    made = {"prompt_token_ids": request["prompt"]}
    if (seed := request["params"].get("image")) is not None:
        import numpy as np
        from PIL import Image

        noise = np.random.default_rng(seed).integers(0, 256, (128, 128, 3), dtype=np.uint8)
        made["multi_modal_data"] = {"image": Image.fromarray(noise)}
    return made


def known(options: dict) -> dict:
    """Without the option that vLLM does not have: before 0.27 it has no warm-up of kernels to switch off."""
    from vllm.config import KernelConfig

    given = options.get("kernel_config", {})
    if all(hasattr(KernelConfig, name) for name in given):
        return options
    return {name: value for name, value in options.items() if name != "kernel_config"}


def update_draft(worker) -> None:
    """Give a DFlash draft other weights, as vLLM's updates do: in place, and what it has fused of them is made anew."""
    draft = worker.get_draft_model().model
    for layer in draft.layers:
        layer.self_attn.qkv_proj.weight.data.mul_(-1)
    draft._build_fused_kv_buffers()


def charge_each_token(worker) -> None:
    """Have adaptive verification count on a time per token, in place of times that were measured."""
    worker.model_runner.adaptive_verification.set_cost_curves([(1, 0.5)], [(n, 4 + 0.3 * n) for n in range(1, 65)])


#: What a load may call beside methods of the worker.
CALLS = {"charge_each_token": charge_each_token, "update_draft": update_draft}


class Recorder:
    """What each step scheduled, sampled and drafted, by the names of the load."""

    def __init__(self, engine) -> None:
        core = engine.engine_core.engine_core
        self.steps: list[dict] = []
        self.preempted = 0
        self._scheduler = core.scheduler
        self._runner = core.model_executor.driver_worker.worker.model_runner
        self._drafts: dict[int, dict] = {}
        self._computed: dict[int, dict] = {}
        self._patches = [
            # In a thread it takes another number of steps each time, and its request waits for it.
            mock.patch.object(core.structured_output_manager, "_use_async_grammar_compilation", False),
            mock.patch.object(core.model_executor, "sample_tokens", busy(core.model_executor.sample_tokens)),
            mock.patch.object(self._runner, "execute_model", self._executed(self._runner.execute_model)),
            mock.patch.object(self._runner, "sample_tokens", self._drafted(self._runner.sample_tokens)),
            mock.patch.object(core.scheduler, "update_from_output", self._updated(core.scheduler.update_from_output)),
        ]

    def __enter__(self):
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_) -> None:
        for patch in self._patches:
            patch.stop()

    def _executed(self, original):
        def execute_model(scheduler_output, *args, **kwargs):
            self._current = scheduler_output
            self.preempted += len(scheduler_output.preempted_req_ids or ())
            output = original(scheduler_output, *args, **kwargs)
            self._computed[id(scheduler_output)] = computed_by(self._runner)
            return output

        return execute_model

    def _drafted(self, original):
        def sample_tokens(*args, **kwargs):
            output = original(*args, **kwargs)
            # What the next step verifies. They do not leave the device where the scheduler runs ahead of it.
            drafts = drafts_of(self._runner)
            self._drafts[id(self._current)] = {
                name_of(request): drafts[request] for request in self._current.num_scheduled_tokens if drafts
            }
            return output

        return sample_tokens

    def _updated(self, original):
        def update_from_output(scheduler_output, model_runner_output):
            sampled = zip(model_runner_output.req_ids, model_runner_output.sampled_token_ids or (), strict=False)
            if scheduler_output.num_scheduled_tokens:
                self.steps.append(
                    {
                        "scheduled": {name_of(one): n for one, n in scheduler_output.num_scheduled_tokens.items()},
                        "verified": {
                            name_of(one): len(drafts)
                            for one, drafts in scheduler_output.scheduled_spec_decode_tokens.items()
                        },
                        "sampled": {name_of(one): list(map(int, tokens)) for one, tokens in sampled},
                        "drafts": self._drafts.pop(id(scheduler_output), {}),
                        "computed": self._computed.pop(id(scheduler_output)),
                    }
                )
            return original(scheduler_output, model_runner_output)

        return update_from_output


def computed_by(runner) -> dict[str, int]:
    """Each request's tokens, where the device decides on them."""
    if getattr(runner, "adaptive_verification", None) is None or runner.execute_model_state is None:
        return {}
    batch = runner.execute_model_state.input_batch
    counts = batch.query_start_loc[: batch.num_reqs + 1].diff().tolist()
    return dict(zip(map(name_of, batch.req_ids), counts, strict=True))


def drafts_of(runner) -> dict[str, list[int]]:
    """Each request's drafts; nothing without speculation."""
    if getattr(runner, "speculator", None) is not None:
        states = runner.req_states
        return {request: states.draft_tokens[row].tolist() for request, row in states.req_id_to_index.items()}
    drafts = getattr(runner, "_draft_token_ids", None)
    return {} if drafts is None else dict(zip(runner.input_batch.req_ids, drafts.tolist(), strict=True))


def busy(original):
    """Before 0.23 the engine looks whether a step is done already, which it never is on a device: here it may be."""

    def sample_tokens(*args, **kwargs):
        future = original(*args, **kwargs)
        if kwargs.get("non_block"):
            future.done = lambda: False
        return future

    return sample_tokens


def name_of(request: str) -> str:
    """vLLM adds a random end to the name that a request was given."""
    return request.split("-")[0]


def answer_of(output) -> dict:
    (completion,) = output.outputs
    logprobs = [
        {str(token): [one.rank, one.logprob] for token, one in position.items()}
        for position in completion.logprobs or ()
    ]
    return {
        "tokens": list(completion.token_ids),
        "logprobs": logprobs,
        "finished": completion.finish_reason,
        "cached": output.num_cached_tokens,
    }


def serve(llm, requests: list[dict], calls: Sequence[Sequence] = ()) -> tuple[dict, Recorder]:
    engine = llm.llm_engine
    added, aborted, answers = set(), set(), {}
    with Recorder(engine) as recorder:
        for step in range(10_000):
            for request in requests:
                name = request["name"]
                if name not in added and step >= request["at"]:
                    params, adapter = sampling_params(request["params"]), adapter_of(request["params"])
                    engine.add_request(name, prompt_of(request), params, **adapter)
                    added.add(name)
                if request.get("abort_at") is not None and step >= request["abort_at"] and name not in aborted:
                    engine.abort_request([name])
                    aborted.add(name)
            for at, method in calls:
                if at == step:
                    engine.collective_rpc(CALLS.get(method, method))
            if engine.has_unfinished_requests():
                answers.update({name_of(output.request_id): answer_of(output) for output in engine.step()})
            elif len(added) == len(requests):
                return answers, recorder
    raise RuntimeError("the load does not come to an end")


def leave_untuned() -> None:
    """Have Triton take the first configuration of each kernel."""
    from triton.runtime.autotuner import Autotuner

    prune = Autotuner.prune_configs
    Autotuner.prune_configs = lambda *args, **kwargs: prune(*args, **kwargs)[:1]


def initialise_as_usual() -> None:
    """Have dummy weights be what training begins with: up to 0.02, and ones where RMSNorm multiplies."""
    load_plugins()
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    load = DummyModelLoader.load_weights
    if hasattr(load, "__wrapped__"):
        return

    @functools.wraps(load)
    def load_weights(self, model, model_config) -> None:
        load(self, model, model_config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data *= 20
        for module in model.modules():
            if "RMSNorm" in type(module).__name__ and getattr(module, "weight", None) is not None:
                module.weight.data.fill_(1)

    DummyModelLoader.load_weights = load_weights


def leave_out_step5() -> None:
    """Have vLLM not import the model Step5 in each warm-up, as 0.33 does; it needs torchvision, which is not here."""
    load_plugins()
    with contextlib.suppress(ImportError):
        from vllm.model_executor.warmup import step5_dsa_warmup

        step5_dsa_warmup._step5_dsa_impl = lambda worker: None


def split_alike() -> None:
    """Let vLLM's batch-invariant mode have layers with a delta rule. It only does not say so of them: their kernels
    compute each request by itself.
    """
    load_plugins()
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend

    GDNAttentionBackend.supports_batch_invariance = classmethod(lambda cls: True)


def add_in_one_order() -> None:
    """Have no kernel of adapters split a sum: its parts are added as they come, and round otherwise in each run."""
    load_plugins()
    from vllm.lora.ops.triton_ops import utils

    utils.is_batch_invariant = True


def end_own_sizes_at(ceiling: int) -> None:
    """Have vLLM's own capture sizes end there."""
    from vllm.config import VllmConfig

    fill = VllmConfig._set_cudagraph_sizes

    def _set_cudagraph_sizes(self) -> None:
        if self.compilation_config.max_cudagraph_capture_size is None:
            self.compilation_config.max_cudagraph_capture_size = ceiling
        fill(self)

    VllmConfig._set_cudagraph_sizes = _set_cudagraph_sizes


@contextlib.contextmanager
def waiting(names: Sequence[str]) -> Iterator[None]:
    """While it lasts, these functions wait for the device when they have done their work."""
    import torch

    def waits(original):
        @functools.wraps(original)
        def call(*args, **kwargs):
            result = original(*args, **kwargs)
            torch.accelerator.synchronize()
            return result

        return call

    with contextlib.ExitStack() as stack:
        for name in names:
            module, _, path = name.partition(":")
            path, _, attribute = path.rpartition(".")
            owner = pkgutil.resolve_name(f"{module}:{path}") if path else importlib.import_module(module)
            stack.enter_context(mock.patch.object(owner, attribute, waits(getattr(owner, attribute))))
        yield


@contextlib.contextmanager
def building_on_the_host() -> Iterator[None]:
    """While it lasts, no builder may build while a graph is recorded, and vLLM may update what they have built."""
    import torch

    from vllm_hwplugin.musa.attention import MusaFlashAttentionMetadataBuilder as Builder
    from vllm_hwplugin.spec_decode import builders

    def build(self, *args, original=Builder.build, **kwargs):
        assert not torch.cuda.is_current_stream_capturing()
        return original(self, *args, **kwargs)

    known = {f"{Builder.__module__}.{Builder.__qualname__}": builders.Builder(updated=True)}
    with mock.patch.object(builders, "BUILDERS", known), mock.patch.object(Builder, "build", build):
        yield


@contextlib.contextmanager
def attention_of_any_batch(what: str) -> Iterator[None]:
    """While it lasts, the stand-in for mate has graphs of any batch, as it computes what a batch's tensors say.

    `what` may also name that the draft takes images, or that KV cache groups with states share their metadata, as vLLM
    has them do on CUDA from 0.32 on.
    """
    from vllm.v1.attention.backend import AttentionCGSupport

    from vllm_hwplugin.musa.attention import MusaFlashAttentionMetadataBuilder

    supported = mock.patch.object(MusaFlashAttentionMetadataBuilder, "_cudagraph_support", AttentionCGSupport.ALWAYS)
    with contextlib.ExitStack() as stack:
        stack.enter_context(supported)
        if "draft takes images" in what:
            stack.enter_context(drafting_with_images())
        if "metadata is shared" in what:
            stack.enter_context(sharing_metadata())
        # What is put before vLLM's methods stays for the steps.
        stack.pop_all()
        yield


def sharing_metadata() -> contextlib.AbstractContextManager:
    """While it lasts, vLLM makes a group's metadata of another group's."""
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder as Builder

    begin = Builder.__init__

    def __init__(self, *args, **kwargs) -> None:
        begin(self, *args, **kwargs)
        self.supports_update_block_table = self.vllm_config.cache_config.mamba_cache_mode == "none"

    return mock.patch.object(Builder, "__init__", __init__)


def drafting_with_images() -> contextlib.AbstractContextManager:
    """While it lasts, Eagle3's draft puts an image's embeddings where its tokens are."""
    from vllm.model_executor.models import llama_eagle3
    from vllm.model_executor.models.utils import _merge_multimodal_embeddings

    def embed_input_ids(self, input_ids, multimodal_embeddings=None, *, is_multimodal=None):
        embeds = self.model.embed_input_ids(input_ids)
        if not multimodal_embeddings:
            return embeds
        parts = [part[..., : embeds.shape[-1]] for part in multimodal_embeddings]
        return _merge_multimodal_embeddings(embeds, multimodal_embeddings=parts, is_multimodal=is_multimodal)

    draft = llama_eagle3.Eagle3LlamaForCausalLM
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(draft, "embed_input_ids", embed_input_ids))
    stack.enter_context(mock.patch.object(draft, "supports_multimodal_embeddings", True, create=True))
    return stack


def memory_for_graphs_too(memory: int) -> contextlib.AbstractContextManager:
    """While it lasts, vLLM has so many bytes for its KV cache and graphs together, whose memory it estimates, as it
    does on CUDA alone.
    """
    load_plugins()
    from vllm.v1.worker.gpu_worker import Worker

    measure = Worker.determine_available_memory

    def determine_available_memory(self) -> int:
        measure(self)
        self.cudagraph_memory_estimate = self.model_runner.profile_cudagraph_memory()
        return memory - self.cudagraph_memory_estimate

    return mock.patch.object(Worker, "determine_available_memory", determine_available_memory)


def not_knowing(what: str) -> contextlib.AbstractContextManager:
    """While it lasts, the plugin does not know what `Load.unknown` names."""
    if what == "updates alone":
        return building_on_the_host()
    if what.startswith("any batch"):
        return attention_of_any_batch(what)
    if what.startswith("FLASH_ATTN_MLA"):
        from . import flash_mla

        load_plugins()
        flash_mla.use(what)
        return contextlib.nullcontext()
    # Where this is not asked for, the module is none that the runs come of.
    from vllm_hwplugin.spec_decode import obstacles

    return mock.patch.object(obstacles, "SPECULATORS", ())


def one(job: dict, others_follow: bool) -> dict:
    if not job["autotuned"]:
        leave_untuned()
    if importlib.util.find_spec("torchvision") is None:
        leave_out_step5()
    if job["initialised"]:
        initialise_as_usual()
    if job["delta_rule"]:
        delta_rule.register()
    if job["images"]:
        from . import images

        images.register()
    if os.environ.get("VLLM_BATCH_INVARIANT") == "1":
        split_alike()
    if job["options"].get("enable_lora"):
        add_in_one_order()
    if job["ceiling"] is not None:
        end_own_sizes_at(job["ceiling"])
    import torch
    from vllm import LLM
    from vllm.platforms import current_platform

    from vllm_hwplugin.base import run_records
    from vllm_hwplugin.spec_decode import step_counts
    from vllm_hwplugin_lab.bench._inside import check_runner, model_runner, runner_generation
    from vllm_hwplugin_lab.bench._watch import watched

    leave_out_of_collections()
    from . import kv_connector

    kv_connector.SHOWN.clear()
    with contextlib.ExitStack() as stack:
        stack.enter_context(waiting(job["waits"]))
        if job["unknown"]:
            stack.enter_context(not_knowing(job["unknown"]))
        if job["memory"] is not None:
            stack.enter_context(memory_for_graphs_too(job["memory"]))
        freezes = stack.enter_context(mock.patch.object(gc, "freeze", wraps=gc.freeze))
        llm = LLM(**known(job["options"]))
    runner = model_runner(llm)
    check_runner(runner)
    attention = sorted({group.backend.__name__ for groups in runner.attn_groups for group in groups})
    graphs = getattr(torch.cuda, "CUDAGraph", None) if runner.device.type != "cpu" else None
    with watched(runner, graphs) as counts:
        answers, recorder = serve(llm, job["requests"], job["calls"])
        steps, preempted = recorder.steps, recorder.preempted
        if job["sleeps"]:
            # Its blocks will not be what they were.
            llm.reset_prefix_cache()
            llm.sleep(level=1)
            llm.wake_up()
            again = [{**request, "name": f"{request['name']}2"} for request in job["requests"]]
            more, recorder = serve(llm, again, job["calls"])
            answers, steps, preempted = {**answers, **more}, steps + recorder.steps, preempted + recorder.preempted
    if others_follow:
        # The process's end does it as well, and the first Model Runner V2 cannot be shut down.
        llm.llm_engine.engine_core.shutdown()
    step_counts.save()
    entry = run_records.current()
    # An engine's uses are settled when it is built.
    uses = entry.uses if entry is not None else {}
    return {
        "runner": runner_generation(runner),
        "platform": type(current_platform).__name__,
        "attention": attention,
        "answers": answers,
        "steps": steps,
        "preempted": preempted,
        "used": sorted(name for name, use in uses.items() if use["used"]),
        "unused": {name: use["reason"] for name, use in uses.items() if not use["used"]},
        "counts": counts.facts(),
        "counted": entry.steps if entry is not None else {},
        # The next engine of this process adds its own.
        "noted": dict(entry.decisions) if entry is not None else {},
        "shown": list(kv_connector.SHOWN),
        "freezes": freezes.call_count,
    }


ROOT = Path(__file__).parents[2]


def digest_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def own_modules() -> dict[str, str]:
    """The files of the modules of this project that this process has imported, from its root on, and their digests."""
    files = {Path(found).resolve() for one in list(sys.modules.values()) if (found := getattr(one, "__file__", None))}
    return {
        str(file.relative_to(ROOT)): digest_of(file)
        for file in files
        # Of some modules of torch's there is no file.
        if file.is_relative_to(ROOT) and not file.is_relative_to(ROOT / ".venv") and file.exists()
    }


def collect_seldom() -> None:
    """Importing vLLM alone takes a third longer where every 700 new objects are looked through, and has no garbage."""
    gc.set_threshold(100_000)


if __name__ == "__main__":
    collect_seldom()
    jobs = json.loads(Path(sys.argv[1]).read_text())
    runs = {name: one(job, others_follow=name != list(jobs)[-1]) for name, job in jobs.items()}
    Path(sys.argv[2]).write_text(json.dumps({"runs": runs, "modules": own_modules()}))
