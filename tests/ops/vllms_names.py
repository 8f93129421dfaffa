# SPDX-License-Identifier: Apache-2.0
"""Calls of vLLM's own functions, on any device, for every operation that the plugin defines where vLLM does not.

What they have to write comes from the plugin's own operations, or a plain definition, on the CPU.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch

from vllm_hwplugin.ops.operations import OPS, Operation

Tensors = dict[str, torch.Tensor]

TOKENS, HIDDEN, LAYERS = 5, 128, 3


class WithoutExtension(importlib.abc.MetaPathFinder):
    """A build of vLLM for no device: it has none of the compiled modules."""

    NAMES = ("vllm._C", "vllm._moe_C")

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name.startswith(self.NAMES):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    @classmethod
    def install(cls) -> None:
        assert not any(name.startswith(cls.NAMES) for name in sys.modules)
        sys.meta_path.insert(0, cls())


class Case(NamedTuple):
    """``make`` gives inputs and outputs on the CPU; ``vllm`` and ``expected`` write into what they are given."""

    make: Callable[[torch.Generator], Tensors]
    vllm: Callable[[Tensors], None]
    expected: Callable[[Tensors], None]


def cases(ops: Any, own: Callable[[str], Callable[..., None]]) -> dict[str, Case]:
    """A case for each operation but ``weak_ref_tensor``.

    Args:
        ops: ``vllm._custom_ops``.
        own: the plugin's function for an operation.
    """

    def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def rope_cache(generator: torch.Generator, rotary_dim: int) -> torch.Tensor:
        angles = torch.rand(64, rotary_dim // 2, generator=generator)
        return torch.cat([angles.cos(), angles.sin()], -1).half()

    def positions(generator: torch.Generator) -> torch.Tensor:
        return torch.randint(1, 64, (TOKENS,), generator=generator)

    def norm_inputs(generator: torch.Generator) -> Tensors:
        # The context keys of a drafter: one row of weights for each layer.
        x = normal(generator, LAYERS, TOKENS, 2, HIDDEN)
        return {"out": torch.zeros_like(x), "x": x, "weight": normal(generator, LAYERS, HIDDEN)}

    def plain_norm(t: Tensors) -> None:
        for layer in range(LAYERS):
            x = t["x"][layer].double()
            normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
            t["out"][layer] = (normed * t["weight"][layer].double()).half()

    def penalty_inputs(generator: torch.Generator) -> Tensors:
        masks = torch.rand(2, TOKENS, 50, generator=generator) > 0.5
        return {
            "logits": normal(generator, TOKENS, 50, dtype=torch.float32),
            "prompt": masks[0],
            "output": masks[1],
            "penalties": torch.rand(TOKENS, generator=generator) + 0.5,
        }

    def penalties(t: Tensors) -> None:
        # vLLM's function looks for is_cuda, which torchada answers for MUSA.
        call = ops.apply_repetition_penalties if t["logits"].is_cuda else ops.apply_repetition_penalties_cuda
        call(t["logits"], t["prompt"], t["output"], t["penalties"])

    def plain_penalties(t: Tensors) -> None:
        seen = t["prompt"] | t["output"]
        by = t["penalties"].unsqueeze(1)
        t["logits"].copy_(
            torch.where(seen, torch.where(t["logits"] > 0, t["logits"] / by, t["logits"] * by), t["logits"])
        )

    def cache_inputs(generator: torch.Generator) -> Tensors:
        slots = torch.randperm(12, generator=generator)[:TOKENS]
        return {
            # More tokens than slots, as padding leaves them.
            "key": normal(generator, TOKENS + 2, 2, 8),
            "value": normal(generator, TOKENS + 2, 2, 8),
            "cache": normal(generator, 2, 3, 4, 2, 8),
            "slots": torch.where(torch.rand(TOKENS, generator=generator) > 0.4, slots, -1),
        }

    def plain_cache(t: Tensors) -> None:
        for token, slot in enumerate(t["slots"].tolist()):
            if slot >= 0:
                t["cache"][0, slot // 4, slot % 4] = t["key"][token]
                t["cache"][1, slot // 4, slot % 4] = t["value"][token]

    def cache_call(t: Tensors) -> None:
        one = torch.ones((), device=t["key"].device)
        ops.reshape_and_cache_flash(t["key"], t["value"], *t["cache"].unbind(0), t["slots"], "auto", one, one)

    def latent_inputs(generator: torch.Generator) -> Tensors:
        made = cache_inputs(generator)
        return {
            "latent": normal(generator, TOKENS + 2, 6),
            "rotary": normal(generator, TOKENS + 2, 2),
            "cache": normal(generator, 3, 4, 8),
            "slots": made["slots"],
        }

    def plain_latent(t: Tensors) -> None:
        for token, slot in enumerate(t["slots"].tolist()):
            if slot >= 0:
                t["cache"][slot // 4, slot % 4] = torch.cat([t["latent"][token], t["rotary"][token]])

    def latent_call(t: Tensors) -> None:
        one = torch.ones((), device=t["cache"].device)
        ops.concat_and_cache_mla(t["latent"], t["rotary"], t["cache"], t["slots"], "auto", one)

    def gather_inputs(generator: torch.Generator) -> Tensors:
        """Of three requests 3, no and 6 rows, from positions 4, 0 and 0 on."""
        return {
            "cache": normal(generator, 9, 4, 8),
            "table": torch.randperm(9, generator=generator).int().view(3, 3),
            "ends": torch.tensor([0, 3, 3, 9], dtype=torch.int32),
            "of": torch.tensor([0] * 3 + [2] * 6 + [7], dtype=torch.int32),
            "from": torch.tensor([4, 0, 0], dtype=torch.int32),
            "out": normal(generator, 11, 8),
        }

    def plain_gather(t: Tensors) -> None:
        rows = [(0, 4), (0, 5), (0, 6), *((2, position) for position in range(6))]
        for row, (request, position) in enumerate(rows):
            t["out"][row] = t["cache"][t["table"][request, position // 4], position % 4]

    def gather_call(t: Tensors) -> None:
        one = torch.ones((), device=t["out"].device)
        ops.gather_and_maybe_dequant_cache(
            t["cache"], t["out"], t["table"], t["ends"], t["of"], 9, "auto", one, t["from"]
        )

    def plain_rope(t: Tensors) -> None:
        from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

        query, _ = RotaryEmbedding.forward_static(t["positions"], t["query"], None, 64, 64, t["cache"], True)
        t["query"].copy_(query)

    def rope_inputs(generator: torch.Generator) -> Tensors:
        return {
            "positions": positions(generator),
            "query": normal(generator, TOKENS, 4 * 64),
            "cache": rope_cache(generator, 64),
        }

    def align_inputs(generator: torch.Generator) -> Tensors:
        # Eleven tokens, three experts each of seven; the second and the fifth are another rank's, and no token's is -1.
        ids = torch.rand(11, 7, generator=generator).topk(3).indices.int()
        return {
            "ids": torch.where(torch.rand(11, 1, generator=generator) > 0.2, ids, -1),
            "map": torch.tensor([0, -1, 1, 2, -1, 3, 4], dtype=torch.int32),
            "sorted": torch.zeros(33 + 7 * 3, dtype=torch.int32),
            "experts": torch.zeros(14, dtype=torch.int32),
            "rows": torch.zeros(1, dtype=torch.int32),
        }

    def plain_align(t: Tensors) -> None:
        rows: list[int] = []
        experts: list[int] = []
        for expert, local in enumerate(t["map"].tolist()):
            own_rows = [] if local < 0 else [i for i, one in enumerate(t["ids"].flatten().tolist()) if one == expert]
            own_rows += [33] * (-len(own_rows) % 4)
            rows += own_rows
            experts += [local] * (len(own_rows) // 4)
        t["rows"].fill_(len(rows))
        t["sorted"].copy_(torch.tensor(rows + [33] * (len(t["sorted"]) - len(rows))))
        t["experts"].copy_(torch.tensor(experts + [0] * (14 - len(experts))))

    def act_inputs(generator: torch.Generator) -> Tensors:
        x = normal(generator, TOKENS, 2 * HIDDEN, dtype=torch.float32)
        return {"x": x, "out": torch.zeros(TOKENS, HIDDEN)}

    def act(name: str, gate: Callable[[torch.Tensor], torch.Tensor]) -> Case:
        return Case(
            act_inputs,
            # As vLLM's experts call it.
            lambda t: getattr(torch.ops._C, name)(t["out"], t["x"]),
            lambda t: t["out"].copy_(gate(t["x"][:, :HIDDEN].double()) * t["x"][:, HIDDEN:]),
        )

    def sum_inputs(generator: torch.Generator) -> Tensors:
        return {"x": normal(generator, TOKENS, 3, HIDDEN), "out": normal(generator, TOKENS, HIDDEN)}

    def small_inputs(scales: int) -> Callable[[torch.Generator], Tensors]:
        def make(generator: torch.Generator) -> Tensors:
            x = normal(generator, TOKENS, HIDDEN)
            # As padding leaves it.
            x[-1] = 0
            return {
                "x": x,
                "out": torch.zeros(TOKENS, HIDDEN),
                "scale": torch.rand(scales, 1, generator=generator) + 0.01,
                "azp": torch.randint(-9, 9, (scales, 1), generator=generator, dtype=torch.int32),
            }

        return make

    def put(t: Tensors, made: Sequence[torch.Tensor | None]) -> None:
        """What a tensor and its scales stand for."""
        numbers, scale, azp = (*made, None)[:3]
        assert numbers is not None
        assert scale is not None
        t["out"].copy_((numbers.float() - (0 if azp is None else azp)) * scale)
        t["scale"].copy_(scale)
        if azp is not None:
            t["azp"].copy_(azp)

    def plain_small(most: float, *, symmetric: bool = True, static: bool = False) -> Callable[[Tensors], None]:
        def write(t: Tensors) -> None:
            rows = t["x"].float().view(len(t["scale"]), -1)
            low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
            scale = t["scale"]
            if not static:
                scale = rows.abs().amax(-1, keepdim=True) / most if symmetric else (high - low) / 255
                # Of zeros.
                scale = scale.clamp(min=1 / (448 * 512) if most == 448 else 0)
            azp = (-128 - torch.nan_to_num(low / scale)).round() if not (symmetric or static) else t["azp"].float()
            at = rows / scale + (0 if symmetric else azp)
            at = at.clamp(-448, 448) if most == 448 else at.round().clamp(-128, 127)
            numbers = torch.nan_to_num(at, -128).to(e4m3 if most == 448 else int8).float() - (0 if symmetric else azp)
            t["out"].copy_((numbers * scale).view(t["out"].shape))
            t["scale"].copy_(scale)
            if not symmetric:
                t["azp"].copy_(azp)

        return write

    def good_call(item: Operation) -> Case:
        """A call of the plugin's own tests, with what vLLM's operation takes of it."""
        module = importlib.import_module(f"tests.ops.test_{item.name}")
        theirs = getattr(getattr(torch.ops, item.namespace), item.name)
        taken = [one.name for one in theirs.default._schema.arguments]

        def make(generator: torch.Generator) -> Tensors:
            torch.manual_seed(generator.initial_seed())
            return {name: value for name, value in module.call_with().items() if isinstance(value, torch.Tensor)}

        def call(operation: Callable[..., None], t: Tensors) -> None:
            given = {**module.call_with(), **t}
            operation(**{name: given[name] for name in taken if name in given})

        return Case(make, partial(call, theirs), partial(call, own(item.name)))

    e4m3, int8 = torch.float8_e4m3fn, torch.int8
    return {
        "static_scaled_fp8_quant": Case(
            small_inputs(1),
            lambda t: put(t, ops.scaled_fp8_quant(t["x"], t["scale"])),
            plain_small(448, static=True),
        ),
        "dynamic_scaled_fp8_quant": Case(
            small_inputs(1), lambda t: put(t, ops.scaled_fp8_quant(t["x"])), plain_small(448)
        ),
        "dynamic_per_token_scaled_fp8_quant": Case(
            small_inputs(TOKENS),
            lambda t: put(t, ops.scaled_fp8_quant(t["x"], use_per_token_if_dynamic=True)),
            plain_small(448),
        ),
        "static_scaled_int8_quant": Case(
            small_inputs(1),
            lambda t: put(t, ops.scaled_int8_quant(t["x"], t["scale"], t["azp"], symmetric=False)),
            plain_small(127, symmetric=False, static=True),
        ),
        "dynamic_scaled_int8_quant": Case(
            small_inputs(TOKENS), lambda t: put(t, ops.scaled_int8_quant(t["x"])), plain_small(127)
        ),
        "moe_align_block_size": Case(
            align_inputs,
            lambda t: ops.moe_align_block_size(t["ids"], 7, 4, t["sorted"], t["experts"], t["rows"], t["map"]),
            plain_align,
        ),
        "moe_sum": Case(
            sum_inputs, lambda t: ops.moe_sum(t["x"], t["out"]), lambda t: t["out"].copy_(t["x"].double().sum(1))
        ),
        "silu_and_mul": act("silu_and_mul", torch.nn.functional.silu),
        "gelu_and_mul": act("gelu_and_mul", torch.nn.functional.gelu),
        "gelu_tanh_and_mul": act("gelu_tanh_and_mul", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
        "rms_norm": Case(norm_inputs, lambda t: ops.rms_norm(t["out"], t["x"], t["weight"], 1e-6), plain_norm),
        "apply_repetition_penalties_": Case(penalty_inputs, penalties, plain_penalties),
        "reshape_and_cache_flash": Case(cache_inputs, cache_call, plain_cache),
        "concat_and_cache_mla": Case(latent_inputs, latent_call, plain_latent),
        "gather_and_maybe_dequant_cache": Case(gather_inputs, gather_call, plain_gather),
        "rotary_embedding": Case(
            rope_inputs,
            lambda t: ops.rotary_embedding(t["positions"], t["query"], None, 64, t["cache"], True),
            plain_rope,
        ),
        **{name: good_call(item) for name, item in OPS.items() if name != "rotary_embedding"},
    }


@dataclass
class Check:
    """One case on one device, with tensors that keep their addresses."""

    case: Case
    device: torch.device

    def __post_init__(self) -> None:
        self.tensors = {name: tensor.to(self.device) for name, tensor in self._make(0).items()}

    def _make(self, seed: int) -> Tensors:
        return self.case.make(torch.Generator().manual_seed(seed))

    def call(self) -> None:
        self.case.vllm(self.tensors)

    def compare(self, seed: int, run: Callable[[], object]) -> None:
        """Runs on new data in the same tensors, and compares everything that is read or written."""
        wanted = self._make(seed)
        for name, tensor in wanted.items():
            self.tensors[name].copy_(tensor)
        run()
        self.case.expected(wanted)
        for name, tensor in wanted.items():
            # torch compares numbers of 8 bits bit by bit alone.
            found, right = (one.float() if one.itemsize == 1 else one for one in (self.tensors[name].cpu(), tensor))
            torch.testing.assert_close(found, right, atol=2e-3, rtol=2e-3, msg=lambda m, n=name: f"{n}: {m}")


def check_weak_references(weak_ref_tensors: Callable[[Any], Any], device: torch.device) -> None:
    """By vLLM's own function: the same memory, seen the same way, and kept by nobody."""
    from torch.multiprocessing.reductions import StorageWeakRef

    whole = torch.arange(24, device=device).view(4, 6).half()
    for view in (whole, whole[1:, 2:4], whole.t(), whole[2, 3], whole[:1].expand(5, 6)):
        (seen,) = weak_ref_tensors([view])
        assert (seen.data_ptr(), seen.shape, seen.stride()) == (view.data_ptr(), view.shape, view.stride())
        assert (seen.dtype, seen.device) == (view.dtype, view.device)
        assert torch.equal(seen.cpu(), view.cpu())
    (seen, empty) = weak_ref_tensors((whole, whole[:0]))
    whole.add_(1)
    assert torch.equal(seen.cpu(), whole.cpu())
    assert empty.numel() == 0
    kept = StorageWeakRef(whole.untyped_storage())
    assert not kept.expired()
    del whole, view, empty
    assert kept.expired()
