# SPDX-License-Identifier: Apache-2.0
"""Train a small target with an MTP layer: `python -m benchmarks.train_mtp TEXT.xz ... --tokenizer FOLDER --out FOLDER`.

Dummy weights cannot judge how many drafts `VLLM_HWPLUGIN_V2_DRAFT_HEAD` loses. This target has trained weights and the
vocabulary of a real tokenizer, and its MTP layer drafts with the target's head. vLLM loads it as MiMo.

A text file has documents with a NUL between them. The MTP layer learns the target's own choice for the next token, also
from its own hidden states, as in vLLM's second and third draft.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional

#: Passes of the MTP layer that are trained.
DRAFTS: Final = 3
#: Share of the positions at which each pass is trained: the head takes most of the time.
_SHARE: Final = 0.4
_RATE: Final = 2e-3
_HEAD_DIM: Final = 64
_EPSILON: Final = 1e-6
_THETA: Final = 10000.0
#: Rows of the head's loss that are computed together.
_ROWS: Final = 4096
#: Steps before the clock starts, while functions are compiled.
_COMPILING: Final = 4

_Turn = tuple[torch.Tensor, torch.Tensor]


class Layer(nn.Module):  # type: ignore[misc]
    """A decoder layer of Qwen2."""

    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        hidden, inner, keys = config["hidden_size"], config["intermediate_size"], config["num_key_value_heads"]
        self.input_layernorm = nn.RMSNorm(hidden, _EPSILON)
        self.post_attention_layernorm = nn.RMSNorm(hidden, _EPSILON)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(hidden, hidden),
                "k_proj": nn.Linear(hidden, keys * _HEAD_DIM),
                "v_proj": nn.Linear(hidden, keys * _HEAD_DIM),
                "o_proj": nn.Linear(hidden, hidden, bias=False),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(hidden, inner, bias=False),
                "up_proj": nn.Linear(hidden, inner, bias=False),
                "down_proj": nn.Linear(inner, hidden, bias=False),
            }
        )

    def forward(self, x: torch.Tensor, turn: _Turn, passes: list[_Turn] | None = None) -> torch.Tensor:
        """Return the layer's output.

        Args:
            x: (texts, length, hidden).
            turn: cosines and sines of the positions, for rotary embedding.
            passes: keys and values of earlier passes over the texts; this pass's are appended. Column t of a pass reads
                columns up to t of the first pass, and column t of the passes between, as a request's drafts do.
        """
        attention, normed = self.self_attn, self.input_layernorm(x)
        q, k, v = (
            attention[name](normed).unflatten(-1, (-1, _HEAD_DIM)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        q, k, mask = _rotate(q, turn), _rotate(k, turn), None
        if passes is not None:
            passes.append((k, v))
            k, v = (torch.cat(parts, 2) for parts in zip(*passes, strict=True))
            own = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
            mask = torch.cat([own.cumsum(0).bool(), *[own] * (len(passes) - 1)], 1)
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + attention["o_proj"](mixed.transpose(1, 2).flatten(2))
        normed = self.post_attention_layernorm(x)
        gate = functional.silu(self.mlp["gate_proj"](normed))
        return x + self.mlp["down_proj"](gate * self.mlp["up_proj"](normed))


def _rotate(x: torch.Tensor, turn: _Turn) -> torch.Tensor:
    cos, sin = (part.to(x.dtype) for part in turn)
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class Model(nn.Module):  # type: ignore[misc]
    """The target and its MTP layer."""

    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        hidden, vocabulary = config["hidden_size"], config["vocab_size"]
        self.embed_tokens = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(hidden, _EPSILON)
        self.mtp = Layer(config)
        self.mtp.input_proj = nn.Linear(2 * hidden, hidden, bias=False)
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            setattr(self.mtp, name, nn.RMSNorm(hidden, _EPSILON))
        tied = config["tie_word_embeddings"]
        self.lm_head = self.embed_tokens if tied else nn.Linear(hidden, vocabulary, bias=False)
        for name, weight in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(weight)
            elif weight.dim() == 2:
                last = "o_proj" in name or "down_proj" in name
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * len(self.layers)) ** last)

    def _turn(self, first: int, length: int) -> _Turn:
        device = self.norm.weight.device
        speed = _THETA ** (-torch.arange(0, _HEAD_DIM, 2, device=device) / _HEAD_DIM)
        angle = torch.outer(torch.arange(first, first + length, device=device), speed)
        return angle.cos(), angle.sin()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the target's hidden states before its last norm."""
        x, turn = self.embed_tokens(tokens), self._turn(0, tokens.shape[1])
        for layer in self.layers:
            x = layer(x, turn)
        return x

    def drafts(self, tokens: torch.Tensor, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the hidden states of each pass.

        Column t of pass s predicts token t + 2 + s, from the text's token t + 1 + s and from column t of pass s - 1.
        """
        mtp = self.mtp
        passes: list[_Turn] = []
        for number in range(DRAFTS):
            words = self.embed_tokens(tokens.roll(-1 - number, 1))
            if number == 0:
                # vLLM masks position 0.
                words = torch.cat([torch.zeros_like(words[:, :1]), words[:, 1:]], 1)
            x = mtp.input_proj(torch.cat([mtp.hidden_layernorm(hidden), mtp.token_layernorm(words)], -1))
            hidden = mtp.final_layernorm(mtp(x, self._turn(number, tokens.shape[1]), passes))
            yield hidden

    def save(self, config: Mapping[str, Any], folder: Path) -> None:
        """Write weights and config as a checkpoint of MiMo."""
        weights = {}
        for name, weight in self.state_dict().items():
            if not name.startswith("lm_head"):
                name = f"model.{name}".replace("model.mtp.", "model.mtp_layers.0.")
            if name != "lm_head.weight" or not config["tie_word_embeddings"]:
                weights[name] = weight.to(torch.bfloat16).cpu().contiguous()
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=1))


def _rows_loss(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each row's loss and best token, and the loss's gradient."""
    wide = logits.float()
    loss = wide.logsumexp(-1) - wide.gather(1, labels[:, None])[:, 0]
    right = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    return loss, wide.argmax(-1), (wide.softmax(-1) - right.float()).to(logits.dtype)


class HeadLoss(torch.autograd.Function):  # type: ignore[misc]
    """Mean loss of a head, and each row's best token. Only some rows have logits at a time."""

    rows_loss = staticmethod(_rows_loss)

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loss, best = torch.zeros((), device=hidden.device), torch.empty_like(labels)
        rows, head = (part.to(torch.bfloat16 if hidden.is_cuda else part.dtype) for part in (hidden, weight))
        rows_slope = torch.empty_like(rows)
        head_slope = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for at in range(0, len(rows), _ROWS):
            part = slice(at, at + _ROWS)
            losses, best[part], slope = HeadLoss.rows_loss(rows[part] @ head.T, labels[part])
            loss += losses.sum()
            rows_slope[part] = slope @ head
            if head_slope is not None:
                head_slope += slope.T @ rows[part]
        ctx.slopes, ctx.count = (rows_slope.to(hidden.dtype), head_slope), len(rows)
        ctx.mark_non_differentiable(best)
        return loss / len(rows), best

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        return *(part if part is None else part * (slope / ctx.count) for part in ctx.slopes), None


def losses(model: Model, tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Return the target's loss, each pass's loss, and each pass's agreement.

    A draft agrees if it is the target's choice.

    Args:
        tokens: (texts, length) int64.
    """
    length, hidden, head = tokens.shape[1], model(tokens), model.lm_head.weight
    loss, best = HeadLoss.apply(model.norm(hidden)[:, :-1].flatten(0, 1), head, tokens[:, 1:].flatten())
    best = best.view(len(tokens), length - 1)
    drafts, agreed = [], []
    for number, states in enumerate(model.drafts(tokens, hidden.detach())):
        states, labels = states[:, : length - 2 - number].flatten(0, 1), best[:, 1 + number :].flatten()
        judged = torch.randperm(len(labels), device=labels.device)[: math.ceil(_SHARE * len(labels))]
        # The drafts leave the target's head as it is.
        draft, drafted = HeadLoss.apply(states[judged], head.detach(), labels[judged])
        drafts.append(draft)
        agreed.append((drafted == labels[judged]).float().mean())
    return loss, drafts, agreed


def read_texts(files: Sequence[Path], tokenizer: Tokenizer, end: int) -> torch.Tensor:
    """Return all documents' tokens in random order, each with `end`."""
    documents = [text for file in files for text in lzma.decompress(file.read_bytes()).decode().split("\0")]
    order, pieces = np.random.default_rng(0).permutation(len(documents)), []
    for at in range(0, len(order), 512):
        coded = tokenizer.encode_batch([documents[index] for index in order[at : at + 512]])
        pieces += [np.array([*document.ids, end], dtype=np.int32) for document in coded]
    return torch.from_numpy(np.concatenate(pieces))


def train(model: Model, text: torch.Tensor, asked: argparse.Namespace) -> None:
    device = model.norm.weight.device
    if device.type == "cuda":
        for layer in model.layers:
            layer.compile(dynamic=False)
        HeadLoss.rows_loss = staticmethod(torch.compile(_rows_loss, dynamic=False))
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n and "lm_head" not in n]
    inside = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in inside]
    optimizers = [
        torch.optim.Muon(matrices, lr=_RATE, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    windows = text[: len(text) // asked.length * asked.length].view(-1, asked.length)
    order = np.random.default_rng(1).permutation(len(windows))
    step, began = 0, time.monotonic()
    while True:
        if step == _COMPILING:
            began = time.monotonic()
        done = step / asked.steps if asked.steps else (time.monotonic() - began) / (60 * asked.minutes)
        if done >= 1:
            return
        chosen = order[np.arange(step * asked.batch, (step + 1) * asked.batch) % len(order)]
        tokens = windows[torch.from_numpy(chosen)].to(device, torch.int64)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = _RATE * min(1, 0.01 + done / 0.03, (1 - done) / 0.6)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss, drafts, agreed = losses(model, tokens)
        (loss + sum(drafts) / DRAFTS).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 50 == 0:
            shares = " ".join(f"{share:.1%}" for share in agreed)
            seconds, seen = time.monotonic() - began, (step + 1) * tokens.numel() / 1e6
            print(f"{seconds:.0f} s, step {step}, {seen:.1f}M tokens: loss {loss:.3f}, drafts as the target {shares}")
        step += 1


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="+", type=Path, help="xz files of documents")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--tied", action="store_true", help="the head is the embedding")
    parser.add_argument("--hidden", type=int, default=640, help="a multiple of 128")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=768, help="tokens of a text in a batch")
    parser.add_argument("--batch", type=int, default=40)
    parser.add_argument("--minutes", type=float, default=7.0, help="after compilation")
    parser.add_argument("--steps", type=int, help="in place of --minutes")
    asked = parser.parse_args(arguments)
    tokenizer = Tokenizer.from_file(str(asked.tokenizer / "tokenizer.json"))
    end_text = json.loads((asked.tokenizer / "tokenizer_config.json").read_text())["eos_token"]
    [end] = tokenizer.encode(end_text, add_special_tokens=False).ids
    config = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": math.ceil(tokenizer.get_vocab_size() / 256) * 256,
        "hidden_size": asked.hidden,
        "intermediate_size": asked.hidden * 11 // 4 // 64 * 64,
        "num_hidden_layers": asked.layers,
        "num_attention_heads": asked.hidden // _HEAD_DIM,
        "num_key_value_heads": asked.hidden // _HEAD_DIM // 2,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 2048,
        "rope_theta": _THETA,
        "rms_norm_eps": _EPSILON,
        "tie_word_embeddings": asked.tied,
        "torch_dtype": "bfloat16",
        "eos_token_id": end,
    }
    torch.manual_seed(0)
    text = read_texts(asked.text, tokenizer, end)
    print(f"{len(text) / 1e6:.1f}M tokens of a vocabulary of {config['vocab_size']}")
    model = Model(config).to("cuda" if torch.cuda.is_available() else "cpu")
    train(model, text, asked)
    model.save(config, asked.out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(asked.tokenizer / name, asked.out)


if __name__ == "__main__":
    main()
