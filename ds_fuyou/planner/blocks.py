# SPDX-License-Identifier: Apache-2.0
"""One block of a model: what each of its operators owns, computes and leaves for backward. No torch.

A block is attention (grouped heads, or latent as in DeepSeek's) and an MLP (dense, or experts of which a router takes
some for each token), with norms. :func:`block_of` makes its operators; ``families.py`` says what a block is made of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = ["OPERATORS", "Attention", "Block", "Matrix", "Mlp", "Norms", "Operator", "block_of", "mean_operators"]

OPERATORS = (
    *("norm_1", "qkv", "attention", "attention_projection"),
    *("norm_2", "mlp_up", "mlp_activation", "mlp_down"),
)
"""Names of a block's operators in forward order."""


@dataclass(frozen=True)
class Matrix:
    """``copies`` equal matrices, of which a token goes through ``used``; ``linear``: modules that adapters may be put
    beside and that 4 bits may hold (experts stacked in one tensor are none)."""

    inputs: int
    outputs: int
    bias: bool = False
    copies: int = 1
    used: int = 1
    linear: bool = True

    @property
    def params(self) -> int:
        return self.copies * (self.inputs + self.bias) * self.outputs

    @property
    def flops(self) -> float:
        """Of a forward, a token."""
        return 2.0 * self.used * self.inputs * self.outputs


@dataclass(frozen=True)
class Operator:
    """One operator of a block, for one token in 16 bits; of several blocks, their mean.

    Attributes:
        params: parameters it owns; ``linear_params`` of them are weights of linear modules.
        matmul_flops: forward FLOPs a token that do not depend on the sequence.
        attention: (forward FLOPs a token for each position it sees, positions that it sees at most; 0: all).
        output_bytes: of its output a token, kept for backward where it is needed there.
        needed: backward needs this output. That of the last matmul is not, the next block's input holds it.
        adapter_width: inputs and outputs of its linear modules: a low-rank adapter has that times its rank.
        copied_bytes: a token, that it keeps for backward beside inputs and outputs in 16 bits where nothing is computed
            again: copies in fp32, steps of what is not fused.
    """

    name: str
    params: float
    matmul_flops: float = 0.0
    attention: tuple[tuple[float, int], ...] = ()
    output_bytes: float = 0.0
    needed: bool = True
    linear_params: float = 0.0
    adapter_width: float = 0.0
    copied_bytes: float = 0.0

    @property
    def saved_bytes(self) -> float:
        """For backward a token, where nothing is computed again."""
        return self.needed * self.output_bytes + self.copied_bytes

    def flops(self, seq: int) -> float:
        """Forward FLOPs a token at sequence length ``seq``."""
        return self.matmul_flops + sum(flops * min(seq, window or seq) for flops, window in self.attention)


@dataclass(frozen=True)
class Attention:
    """Matrices before and after, and the scores between: ``heads`` of ``key_dim`` and ``value_dim``, within ``window``
    positions (0: all). ``others``: parameters of norms of queries and keys, and sinks. ``copied_bytes`` as of an
    operator.
    """

    before: tuple[Matrix, ...]
    after: Matrix
    heads: int
    key_dim: int
    value_dim: int
    window: int = 0
    others: int = 0
    copied_bytes: float = 0.0


@dataclass(frozen=True)
class Mlp:
    """Matrices into the inner width, and back. ``gated``: half of the inner outputs gate the other half. ``router``:
    parameters and FLOPs beside them that choose experts. ``copied_bytes`` as of an operator."""

    up: tuple[Matrix, ...]
    down: tuple[Matrix, ...]
    gated: bool
    router: tuple[Matrix, ...] = ()
    copied_bytes: float = 0.0


@dataclass(frozen=True)
class Block:
    """The operators of one block, in forward order."""

    operators: tuple[Operator, ...]
    heads: int = 1
    largest_matrix_params: int = 0

    @cached_property
    def params(self) -> int:
        return round(sum(op.params for op in self.operators))

    @cached_property
    def saved_bytes(self) -> float:
        """Of everything that backward needs, a token, without the block's input."""
        return sum(op.saved_bytes for op in self.operators)


@dataclass(frozen=True)
class Norms:
    """``count`` norms of a block, each of ``vectors`` (weight, bias). Where attention and MLP share one, the second has
    nothing of its own. ``after``: the MLP's output goes through one, so backward needs it. ``copied_bytes`` of each."""

    count: int = 2
    vectors: int = 1
    after: bool = False
    copied_bytes: float = 0.0


def block_of(width: int, attention: Attention, mlp: Mlp, norms: Norms) -> Block:
    """A block of ``width`` inputs and outputs."""
    first = -(-norms.count // 2)
    inner = sum(matrix.used * matrix.outputs for matrix in mlp.up)
    scores = 2.0 * attention.heads * (attention.key_dim + attention.value_dim)
    operators = (
        _norm("norm_1", width, first, norms),
        _matmul("qkv", attention.before),
        Operator(
            "attention",
            attention.others,
            attention=((scores, attention.window),),
            output_bytes=2.0 * attention.heads * attention.value_dim,
            copied_bytes=attention.copied_bytes,
        ),
        _matmul("attention_projection", (attention.after,), needed=norms.count > 1),
        _norm("norm_2", width, norms.count - first, norms),
        _matmul("mlp_up", (*mlp.router, *mlp.up), outputs=inner),
        Operator(
            "mlp_activation", 0, output_bytes=2.0 * inner / (2 if mlp.gated else 1), copied_bytes=mlp.copied_bytes
        ),
        _matmul("mlp_down", mlp.down, outputs=width, needed=norms.after),
    )
    matrices = (*attention.before, attention.after, *mlp.up, *mlp.down)
    return Block(operators, attention.heads, max(matrix.params for matrix in matrices))


def _norm(name: str, width: int, count: int, norms: Norms) -> Operator:
    return Operator(
        name,
        count * norms.vectors * width,
        output_bytes=2.0 * count * width,
        copied_bytes=count * norms.copied_bytes,
    )


def _matmul(name: str, matrices: Sequence[Matrix], outputs: int | None = None, needed: bool = True) -> Operator:
    linear = [matrix for matrix in matrices if matrix.linear]
    if outputs is None:
        outputs = sum(matrix.outputs for matrix in matrices)
    return Operator(
        name,
        sum(matrix.params for matrix in matrices),
        sum(matrix.flops for matrix in matrices),
        output_bytes=2.0 * outputs,
        needed=needed,
        linear_params=sum(matrix.copies * matrix.inputs * matrix.outputs for matrix in linear),
        adapter_width=sum(matrix.copies * (matrix.inputs + matrix.outputs) for matrix in linear),
    )


def mean_operators(blocks: Sequence[Block]) -> tuple[Operator, ...]:
    """The operators of a block whose multiple is the sum of all ``blocks``."""
    kinds = Counter(blocks)
    if len(kinds) == 1:
        return blocks[0].operators
    return tuple(_mean([(op, count / len(blocks)) for op, count in column]) for column in _columns(kinds))


def _columns(kinds: Counter[Block]) -> list[list[tuple[Operator, int]]]:
    rows = [[(op, count) for op in block.operators] for block, count in kinds.items()]
    return [list(column) for column in zip(*rows, strict=True)]


def _mean(parts: Sequence[tuple[Operator, float]]) -> Operator:
    by_window: dict[int, float] = {}
    for op, share in parts:
        for flops, window in op.attention:
            by_window[window] = by_window.get(window, 0.0) + share * flops
    first = parts[0][0]

    def mean(name: str) -> float:
        return sum(share * float(getattr(op, name)) for op, share in parts)

    return Operator(
        first.name,
        mean("params"),
        mean("matmul_flops"),
        tuple((flops, window) for window, flops in by_window.items()),
        mean("output_bytes"),
        first.needed,
        mean("linear_params"),
        mean("adapter_width"),
        mean("copied_bytes"),
    )
