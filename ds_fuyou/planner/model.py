# SPDX-License-Identifier: Apache-2.0
"""What a model costs: parameters, FLOPs of every operator, bytes of every operator output. No torch.

A model is a stack of equal decoder or encoder blocks between an embedding and a head. Read from a Hugging Face
``config.json``, from ``gpt:layers,heads,hidden,vocab``, or by the name of a published size (``13B``).
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from ds_fuyou.errors import FuyouConfigError, shown
from ds_fuyou.planner.hardware import model_shapes

__all__ = ["PUBLISHED_VOCAB", "ModelSpec", "Operator", "gpt", "load_model", "output_names", "published_model"]

PUBLISHED_VOCAB = 50257
_GATED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo", "olmo2", "cohere")
_KEYS: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "vocab": ("vocab_size",),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "positions": ("max_position_embeddings", "n_positions"),
}


@dataclass(frozen=True)
class Operator:
    """One operator of a block, for one token in 16 bits.

    Attributes:
        params: parameters it owns.
        matmul_flops: forward FLOPs a token that do not depend on the sequence.
        flops_per_position: forward FLOPs a token for every position of the sequence (attention).
        output_bytes: of its output a token, kept for backward where it is needed there.
        needed: backward needs this output. That of the last matmul is not, the next block's input holds it.
    """

    name: str
    params: int
    matmul_flops: float
    flops_per_position: float
    output_bytes: int
    needed: bool = True

    def flops(self, seq: int) -> float:
        """Forward FLOPs a token at sequence length ``seq``."""
        return self.matmul_flops + self.flops_per_position * seq

    def flops_per_byte(self, seq: int) -> float:
        """What recomputing costs for each byte that is then not moved."""
        return self.flops(seq) / self.output_bytes


@dataclass(frozen=True)
class ModelSpec:
    """Shape of a model; everything else is derived. ``nominal_params`` is a published size's round number."""

    name: str
    layers: int
    heads: int
    hidden: int
    vocab: int
    intermediate: int
    kv_heads: int
    head_dim: int
    gated: bool = False
    tied: bool = True
    positions: int = 0
    nominal_params: float = 0.0

    @cached_property
    def operators(self) -> tuple[Operator, ...]:
        """The operators of a block in forward order."""
        h, i = self.hidden, self.intermediate
        width = self.heads * self.head_dim
        qkv = width + 2 * self.kv_heads * self.head_dim
        up = 2 * i if self.gated else i
        return (
            Operator("norm_1", 2 * h, 0, 0, 2 * h),
            _matmul("qkv", h, qkv),
            Operator("attention", 0, 0, 4 * width, 2 * width),
            _matmul("attention_projection", width, h),
            Operator("norm_2", 2 * h, 0, 0, 2 * h),
            _matmul("mlp_up", h, up),
            Operator("mlp_activation", 0, 0, 0, 2 * i),
            _matmul("mlp_down", i, h, needed=False),
        )

    @cached_property
    def block_params(self) -> int:
        return sum(op.params for op in self.operators)

    @cached_property
    def embedding_params(self) -> int:
        return (self.vocab + self.positions) * self.hidden

    @cached_property
    def head_params(self) -> int:
        """Of an untied head; a tied one owns none."""
        return 0 if self.tied else self.vocab * self.hidden

    @cached_property
    def params(self) -> int:
        return self.layers * self.block_params + self.embedding_params + self.head_params + 2 * self.hidden

    @property
    def counted_params(self) -> float:
        """What published TFLOPS figures count: the round number where the size has one."""
        return self.nominal_params or float(self.params)

    @cached_property
    def largest_unit_params(self) -> int:
        """Parameters of the largest thing that is streamed as a whole: a block or the embedding."""
        return max(self.block_params, self.embedding_params, self.head_params)

    @cached_property
    def _block_flops(self) -> tuple[float, float]:
        return sum(op.matmul_flops for op in self.operators), sum(op.flops_per_position for op in self.operators)

    def block_flops(self, seq: int) -> float:
        """Forward FLOPs of one block a token."""
        matmul, attention = self._block_flops
        return matmul + attention * seq

    @cached_property
    def head_flops(self) -> float:
        return 2.0 * self.vocab * self.hidden

    def forward_flops(self, seq: int) -> float:
        """Of the whole model a token."""
        return self.layers * self.block_flops(seq) + self.head_flops

    @property
    def input_bytes(self) -> int:
        """Of one block's input a token."""
        return 2 * self.hidden

    @cached_property
    def saved_bytes(self) -> int:
        """Of everything that backward of one block needs a token, its input included."""
        return self.input_bytes + sum(op.output_bytes for op in self.operators if op.needed)

    @cached_property
    def fingerprint(self) -> str:
        """Same for equal shapes, whatever the name."""
        shape = {k: v for k, v in asdict(self).items() if k not in ("name", "nominal_params")}
        return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:16]


def _matmul(name: str, inputs: int, outputs: int, needed: bool = True) -> Operator:
    return Operator(name, inputs * outputs + outputs, 2.0 * inputs * outputs, 0, 2 * outputs, needed)


def gpt(name: str, layers: int, heads: int, hidden: int, vocab: int, nominal: float = 0.0) -> ModelSpec:
    """A GPT-2/3 block stack: four hidden widths in the MLP, tied head.

    Raises:
        FuyouConfigError: a size is not positive, or the width cannot be split over the heads.
    """
    for what, value in (("layers", layers), ("heads", heads), ("hidden", hidden), ("vocab", vocab)):
        if value <= 0:
            raise FuyouConfigError(f"model {name}: {what} must be positive, found {value}")
    if hidden % heads:
        raise FuyouConfigError(f"model {name}: hidden {hidden} must be a multiple of heads {heads}")
    return ModelSpec(name, layers, heads, hidden, vocab, 4 * hidden, heads, hidden // heads, nominal_params=nominal)


def output_names() -> tuple[str, ...]:
    """What a plan has fates for: the input of a block, and the outputs of its operators."""
    return ("block_input", *(operator.name for operator in gpt("any", 1, 1, 1, 1).operators))


def published_model(name: str) -> ModelSpec | None:
    """The published GPT of that name ("13B", "gpt3-13b"), None if there is none."""
    wanted = re.sub(r"^gpt-?3?[-_ ]?", "", name.strip().lower())
    for known, (layers, heads, hidden) in model_shapes().items():
        if wanted == known.lower():
            return gpt(known, layers, heads, hidden, PUBLISHED_VOCAB, float(known[:-1]) * 1e9)
    return None


def load_model(text: str) -> ModelSpec:
    """The model that ``text`` names: a published size, ``gpt:…``, or the path of a Hugging Face config (or its folder).

    Raises:
        FuyouConfigError: none of these, or the file does not describe a stack that can be modelled.
    """
    found = published_model(text)
    if found is not None:
        return found
    if text.startswith("gpt:"):
        parts = text[4:].split(",")
        try:
            layers, heads, hidden, vocab = (int(part) for part in parts)
        except ValueError:
            raise FuyouConfigError(
                f"--model {text!r} must be gpt:layers,heads,hidden,vocab with four whole numbers"
            ) from None
        return gpt(text, layers, heads, hidden, vocab)
    path = os.path.join(text, "config.json") if os.path.isdir(text) else text
    if not os.path.isfile(path):
        known = list(model_shapes())
        near = difflib.get_close_matches(text.upper(), known, n=3, cutoff=0.4) or known
        raise FuyouConfigError(
            f"--model {text!r} must be a Hugging Face config.json, gpt:layers,heads,hidden,vocab or a published size; "
            f"there is no such file, nearest sizes are {', '.join(near)}"
        )
    return _from_file(path)


def _from_file(path: str) -> ModelSpec:
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise FuyouConfigError(f"--model {path}: must be a readable JSON file, found {error}") from error
    if not isinstance(config, Mapping):
        raise FuyouConfigError(f"--model {path}: must hold a JSON object, found {type(config).__name__}")
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        config = {**config, **nested}
    if config.get("is_encoder_decoder"):
        raise FuyouConfigError(
            f"--model {path}: an encoder beside a decoder (is_encoder_decoder) is not modelled; only one stack is"
        )
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if config.get(key):
            raise FuyouConfigError(
                f"--model {path}: mixtures of experts ({key}) are not modelled; only dense stacks are"
            )
    return _from_config(path, config)


def _number(path: str, config: Mapping[str, Any], what: str, default: int | None = None) -> int:
    for key in _KEYS[what]:
        value = config.get(key)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise FuyouConfigError(f"--model {path}: {key} must be a positive whole number, found {shown(value)}")
            return value
    if default is None:
        raise FuyouConfigError(
            f"--model {path}: one of {', '.join(_KEYS[what])} must be there; is it a model's config?"
        )
    return default


def _from_config(path: str, config: Mapping[str, Any]) -> ModelSpec:
    layers, heads, hidden, vocab = (_number(path, config, what) for what in ("layers", "heads", "hidden", "vocab"))
    kind = str(config.get("model_type", ""))
    gated = kind in _GATED
    learned = not gated and kind not in ("gpt_neox", "gptj", "bloom", "falcon")
    if hidden % heads and "head_dim" not in config:
        raise FuyouConfigError(f"--model {path}: hidden size {hidden} must be a multiple of the {heads} heads")
    kv_heads = _number(path, config, "kv_heads", heads)
    tied = config.get("tie_word_embeddings", not gated)
    return ModelSpec(
        name=str(config.get("_name_or_path") or kind or os.path.basename(path)),
        layers=layers,
        heads=heads,
        hidden=hidden,
        vocab=vocab,
        intermediate=_number(path, config, "intermediate", 4 * hidden),
        kv_heads=kv_heads,
        head_dim=_number(path, config, "head_dim", hidden // heads),
        gated=gated,
        tied=bool(tied),
        positions=_number(path, config, "positions", 0) if learned else 0,
    )
