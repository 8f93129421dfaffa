# SPDX-License-Identifier: Apache-2.0
"""What mate compiles, by the stand-in's record of it: all before the first request. Not run on MUSA hardware."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_hwplugin.musa.warm_up import warm_up
from vllm_hwplugin.versions import SUPPORTED

torch = pytest.importorskip("torch")

from ..attention.layer import BLOCK, Layer, config  # noqa: E402
from ..attention.released import released  # noqa: E402
from .mate_standin import mate, modules  # noqa: E402

ends = pytest.mark.parametrize("version", [SUPPORTED[0], SUPPORTED[-1]])
OWN = "vllm_hwplugin.musa.attention"
Tree = Callable[[str], Any]
LONGEST = 1024
DRAFTS = 3


def uncomputed(calls: list[dict[str, Any]] | None = None) -> Any:
    """The stand-in, without results: which kernels a call needs is known before."""
    module: Any = mate(calls)
    module.mha_interface._kernels.attend = lambda *_: None
    return module


class Runner:
    """What vLLM's model runner has when it captures graphs: layers with a cache, and builders by KV cache group.

    Args:
        layers: the options of each of the target's layers, each in a group of its own, or all in one.
        method: of speculation; the drafter has one layer, in a group with the target's first.
    """

    def __init__(
        self, load: Any, layers: list[dict[str, Any]], method: str | None = None, *, together: bool = False
    ) -> None:
        backend = load(OWN).MusaFlashAttentionBackend
        self.speculative_config = method and SimpleNamespace(method=method, num_speculative_tokens=DRAFTS)
        made = [Layer(load, backend, **({"head_size": 64} | options)) for options in layers]
        named = {str(number): self.named(layer) for number, layer in enumerate(made)}
        settings = config(
            layers=named,
            speculative_config=self.speculative_config,
            scheduler_config=SimpleNamespace(max_num_seqs=40, max_num_batched_tokens=LONGEST),
        )
        self.caches = [layer.cache for layer in made]

        def group(layer: Layer, names: list[str]) -> Any:
            spec = Layer.spec(layer.head_size)
            builder = backend.get_builder_cls()(spec, names, settings, torch.device("cpu"))
            return SimpleNamespace(get_metadata_builder=lambda _: builder, builder=builder, layers=named)

        if method:
            named["draft"] = self.named(Layer(load, backend, 64, heads=16))
        names = [str(number) for number in range(len(made))]
        pairs = [(made[0], names)] if together else [(layer, [name]) for layer, name in zip(made, names, strict=True)]
        groups = [group(layer, of_group) for layer, of_group in pairs]
        if method:
            groups[0] = group(made[0], ["0", "draft"])
            self.drafter = SimpleNamespace(draft_attn_groups=[group(made[0], ["draft"])])
        # As vLLM has them: for each KV cache group a list; also one of another backend.
        other = SimpleNamespace(get_metadata_builder=lambda _: object())
        self.attn_groups = [*([found] for found in groups), [other]]
        self.target = groups

    @staticmethod
    def named(layer: Layer) -> Any:
        layer.cache.zero_()
        return SimpleNamespace(impl=layer.impl, kv_cache=layer.cache)

    def serve(self, load: Any, new: list[int], context: list[int]) -> None:
        """One step of the target, and a pass of its drafter, over a batch."""
        starts = torch.tensor([0, *new]).cumsum(0).int()
        lengths = torch.tensor(new).add(torch.tensor(context)).int()
        causal = self.speculative_config is None or self.speculative_config.method != "dflash"

        def common(causal: bool) -> Any:
            found = load("vllm.v1.attention.backend").CommonAttentionMetadata
            return found(
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                seq_lens=lengths,
                num_reqs=len(new),
                num_actual_tokens=sum(new),
                max_query_len=max(new),
                max_seq_len=int(lengths.max()),
                block_table_tensor=torch.zeros(len(new), LONGEST // BLOCK, dtype=torch.int32),
                slot_mapping=torch.zeros(sum(new)),
                causal=causal,
                seq_lens_cpu_upper_bound=lengths,
            )

        for group in self.target:
            for name in group.builder.layer_names:
                layer = group.layers[name]
                if name != "draft":
                    layer.impl.call_with_zeros(layer, group.builder.build(0, common(True)))
        if self.speculative_config:
            (group,) = self.drafter.draft_attn_groups
            layer = group.layers["draft"]
            layer.impl.call_with_zeros(layer, group.builder.build_for_drafting(common(causal), 0))


MODELS: dict[str, dict[str, Any]] = {
    "one kind of layer": {"layers": [{}, {}]},
    "windows, softcap, sinks and sizes": {
        "layers": [
            {"heads": 10, "sliding_window": 128},
            {"heads": 6, "head_size": 256},
            {"heads": 64, "logits_soft_cap": 5.0},
            {"heads": 2, "sinks": torch.zeros(2).bfloat16()},
        ],
    },
    # With windows also, where vLLM has one kind of KV cache.
    "layers of one group": {
        "layers": [{}, {"sliding_window": 128}, {"logits_soft_cap": 5.0}, {"sinks": torch.zeros(4).bfloat16()}],
        "together": True,
    },
    "Eagle3": {"layers": [{"heads": 4}], "method": "eagle3"},
    "DFlash": {"layers": [{"heads": 14}], "method": "dflash"},
}


@ends
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_nothing_is_compiled_while_it_serves(version: str, model: dict[str, Any], vllm_tree: Tree) -> None:
    module = uncomputed()
    with released(version, vllm_tree(version), mate=module) as load:
        runner = Runner(load, **model)
        warm_up(runner)
        warm = modules(module)
        assert not any(cache.any() for cache in runner.caches)
        dice = random.Random(0)
        decode = 1 + (DRAFTS if "method" in model else 0)
        for longest in [1, 2, decode, *(dice.randrange(1, 400) for _ in range(25)), LONGEST]:
            for requests in (1, dice.randrange(2, 36)):
                # Decodes in any number; prompts as the scheduler's budget of tokens allows.
                new = [longest, *(dice.randrange(1, min(longest, 8) + 1) for _ in range(requests - 1))]
                context = [dice.randrange(0, LONGEST - tokens + 1) for tokens in new]
                for before in (context, [0] * requests):
                    runner.serve(load, new, before)
                    assert modules(module) == warm, (new, before)


@ends
def test_like_layers_are_called_once(version: str, vllm_tree: Tree) -> None:
    calls: list[dict[str, Any]] = []
    found = []
    for count in (1, 3):
        calls.clear()
        with released(version, vllm_tree(version), mate=uncomputed(calls)) as load:
            runner = Runner(load, [{}])
            (group,) = runner.target
            group.layers.update({str(number): group.layers["0"] for number in range(count)})
            group.builder.layer_names = [*group.layers]
            warm_up(runner)
            found.append(len(calls))
    assert found[0] == found[1] > 0


@ends
@pytest.mark.parametrize("strict", [False, True])
def test_a_kernel_that_does_not_compile_is_a_line_in_the_log(
    version: str,
    strict: bool,
    vllm_tree: Tree,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_HWPLUGIN_STRICT", str(int(strict)))
    module = uncomputed()

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError("mcc: no such file")

    with released(version, vllm_tree(version), mate=module) as load:
        runner = Runner(load, [{}])
        load(OWN)._attend = fails
        if strict:
            with pytest.raises(RuntimeError, match=r"VLLM_HWPLUGIN_STRICT=1, but .*mcc: no such file"):
                warm_up(runner)
            return
        with caplog.at_level(logging.WARNING, "vllm.hwplugin"):
            warm_up(runner)
    (line,) = caplog.messages
    assert "OSError: mcc: no such file" in line
