# SPDX-License-Identifier: Apache-2.0
"""What a model costs: parameters, FLOPs of every operator, bytes of every operator output. No torch.

A model is a stack of blocks between an embedding and a head, and what it has beside them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property

from ds_fuyou.planner.blocks import Block, Operator, mean_operators

__all__ = ["MOST_LAYERS", "MOST_SIZE", "Adapters", "ModelSpec", "Operator"]

MOST_LAYERS, MOST_SIZE = 4096, 10**9
"""Of a model that is believed; each layer's activations are decided on, so that a plan of more takes minutes."""

_FOUR_BITS = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in NF4: a scale of 8 bits for 64 of them, and one of 32 bits for 256 scales."""


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters beside the linear modules of the blocks (of attention alone, if told); everything else is
    frozen, and those modules are held in ``base_bits``."""

    rank: int
    attention_only: bool = False
    base_bits: int = 16

    def beside(self, operator: Operator) -> bool:
        return not self.attention_only or operator.name in ("qkv", "attention_projection")


@dataclass(frozen=True)
class ModelSpec:
    """Shape of a model; everything else is derived.

    Attributes:
        embedding_params: of token and learned position embeddings, which forward needs first.
        head_params: of an untied head; a tied one owns none.
        other_params: norms outside of blocks, projectors between towers and the stack.
        tower_params: of frozen parts beside the stack (a vision tower), needed in forward alone. What images cost in
            FLOPs and activations is not counted: their tokens are those of the sequence.
        nominal_params: a published size's round number.
    """

    name: str
    hidden: int
    vocab: int
    blocks: tuple[Block, ...]
    embedding_params: int = 0
    head_params: int = 0
    other_params: int = 0
    tower_params: int = 0
    nominal_params: float = 0.0
    adapters: Adapters | None = None

    @property
    def layers(self) -> int:
        return len(self.blocks)

    @property
    def heads(self) -> int:
        return max(block.heads for block in self.blocks)

    @cached_property
    def operators(self) -> tuple[Operator, ...]:
        """The operators of a block in forward order; where blocks differ, their mean."""
        return mean_operators(self.blocks)

    @cached_property
    def block_params(self) -> float:
        """Of a block, on average, adapters not counted."""
        return sum(block.params for block in self.blocks) / self.layers

    @cached_property
    def adapter_params(self) -> int:
        adapters = self.adapters
        if adapters is None:
            return 0
        widths = (op.adapter_width for block in self.blocks for op in block.operators if adapters.beside(op))
        return round(adapters.rank * sum(widths))

    @cached_property
    def base_params(self) -> int:
        """Without adapters."""
        blocks = sum(block.params for block in self.blocks)
        return blocks + self.embedding_params + self.head_params + self.other_params + self.tower_params

    @cached_property
    def params(self) -> int:
        return self.base_params + self.adapter_params

    @property
    def trainable_params(self) -> int:
        return self.params - self.frozen_params

    @property
    def frozen_params(self) -> int:
        return self.tower_params if self.adapters is None else self.base_params

    @cached_property
    def frozen_bytes(self) -> float:
        """Of what is not trained: 16 bits each, or 4 where adapters stand beside them."""
        return 2.0 * self.frozen_params - sum(self._saved_by_bits(block) for block in self.blocks)

    def _saved_by_bits(self, block: Block) -> float:
        if self.adapters is None or self.adapters.base_bits == 16:
            return 0.0
        return (2 - _FOUR_BITS) * sum(op.linear_params for op in block.operators)

    @property
    def counted_params(self) -> float:
        """What published TFLOPS figures count: the round number where the size has one."""
        return self.nominal_params or float(self.params)

    @cached_property
    def largest_unit_params(self) -> int:
        """Parameters of the largest thing that is streamed as a whole: a block, the embedding or the head."""
        return max(*(block.params for block in set(self.blocks)), self.embedding_params, self.head_params)

    @cached_property
    def largest_unit_bytes(self) -> float:
        """Of it, or of a block in 4 bits, as it lies in memory."""
        blocks = (2.0 * block.params - self._saved_by_bits(block) for block in set(self.blocks))
        return max(*blocks, 2.0 * self.embedding_params, 2.0 * self.head_params)

    @cached_property
    def largest_unit_trained(self) -> float:
        """Trainable parameters of the unit that has most: gradients of a unit leave the device as a whole."""
        if self.adapters is None:
            return float(self.largest_unit_params)
        return self.adapter_params / self.layers

    @property
    def first_trained_params(self) -> int:
        """Trainable parameters before the first block: their gradients come last, and they are needed first."""
        return self.embedding_params if self.adapters is None else 0

    @cached_property
    def largest_param(self) -> int:
        """Elements of the largest single parameter."""
        blocks = (block.largest_matrix_params for block in self.blocks)
        return max(*blocks, self.vocab * self.hidden)

    @property
    def largest_frozen_bytes(self) -> float:
        """Of the largest single parameter that is not trained, as it lies in memory: of a block on average, and the
        embedding in 16 bits.
        """
        if not self.frozen_params:
            return 0.0
        blocks = (b.largest_matrix_params * (2 - self._saved_by_bits(b) / b.params) for b in set(self.blocks))
        return max(*blocks, 2.0 * self.vocab * self.hidden)

    def block_flops(self, seq: int) -> float:
        """Forward FLOPs of one block a token, on average."""
        return sum(op.flops(seq) for op in self.operators)

    @cached_property
    def head_flops(self) -> float:
        return 2.0 * self.vocab * self.hidden

    def forward_flops(self, seq: int) -> float:
        """Of the whole model a token: of experts only those that a token goes to; of adapters nothing."""
        return self.layers * self.block_flops(seq) + self.head_flops

    @property
    def backward_over_forward(self) -> float:
        """FLOPs of backward in forwards: gradients of inputs and of weights; of a frozen base only the former."""
        return 2.0 if self.adapters is None else 1.0

    def step_flops(self, seq: int) -> float:
        """Of forward and backward of a token, nothing repeated: 6 P and attention, P what a token goes through."""
        return (1 + self.backward_over_forward) * self.forward_flops(seq)

    @property
    def input_bytes(self) -> int:
        """Of one block's input a token."""
        return 2 * self.hidden

    @cached_property
    def saved_bytes(self) -> float:
        """Of everything that backward of one block needs a token, its input included; on average."""
        return self.input_bytes + sum(op.saved_bytes for op in self.operators)

    @cached_property
    def largest_saved_bytes(self) -> float:
        """The same of the block that needs most."""
        return self.input_bytes + max(block.saved_bytes for block in self.blocks)

    @cached_property
    def fingerprint(self) -> str:
        """Same for equal shapes, whatever the name."""
        shape = {k: v for k, v in asdict(self).items() if k not in ("name", "nominal_params")}
        return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:16]
