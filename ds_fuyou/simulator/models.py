# SPDX-License-Identifier: Apache-2.0
"""Models by name: a Hugging Face ``config.json``, ``gpt:layers,heads,hidden,vocab``, or a published size (``13B``);
with adapters over them. No torch.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import replace

from ds_fuyou.errors import FuyouConfigError, shown
from ds_fuyou.planner.blocks import Attention, Matrix, Mlp, Norms, block_of
from ds_fuyou.planner.model import MOST_LAYERS, MOST_SIZE, Adapters, ModelSpec
from ds_fuyou.planner.presets import model_shapes

__all__ = ["PUBLISHED_VOCAB", "gpt", "load_model", "published_model", "with_adapters"]

PUBLISHED_VOCAB = 50257


def with_adapters(model: ModelSpec, rank: int | None, base_bits: int = 16, attention_only: bool = False) -> ModelSpec:
    """The model trained by adapters of ``rank`` alone; as it is for None.

    Raises:
        FuyouConfigError: a rank that is not positive, bits without adapters or other than 4 and 16.
    """
    if base_bits not in (4, 16):
        raise FuyouConfigError(f"--base-bits must be 16 or 4, found {base_bits}")
    if rank is None:
        if base_bits != 16 or attention_only:
            raise FuyouConfigError("--base-bits 4 and --lora-attention need --lora RANK: a base so held is frozen")
        return model
    if not 1 <= rank <= 65536:
        raise FuyouConfigError(f"--lora must be a rank from 1 to 65536, found {rank}")
    return replace(model, adapters=Adapters(rank, attention_only, base_bits))


def gpt(name: str, layers: int, heads: int, hidden: int, vocab: int, nominal: float = 0.0) -> ModelSpec:
    """A GPT-2/3 block stack: four hidden widths in the MLP, tied head.

    Raises:
        FuyouConfigError: a size is not positive, or the width cannot be split over the heads.
    """
    for what, value in (("layers", layers), ("heads", heads), ("hidden", hidden), ("vocab", vocab)):
        most = MOST_LAYERS if what == "layers" else MOST_SIZE
        if not 1 <= value <= most:
            raise FuyouConfigError(f"model {name[:200]}: {what} must be from 1 to {most}, found {shown(value)}")
    if hidden % heads:
        raise FuyouConfigError(f"model {name}: hidden {hidden} must be a multiple of heads {heads}")
    head_dim = hidden // heads
    attention = Attention((Matrix(hidden, 3 * hidden, True),), Matrix(hidden, hidden, True), heads, head_dim, head_dim)
    mlp = Mlp((Matrix(hidden, 4 * hidden, True),), (Matrix(4 * hidden, hidden, True),), gated=False)
    block = block_of(hidden, attention, mlp, Norms(vectors=2))
    return ModelSpec(
        name,
        hidden,
        vocab,
        (block,) * layers,
        embedding_params=vocab * hidden,
        other_params=2 * hidden,
        nominal_params=nominal,
    )


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
        FuyouConfigError: none of these, or the file does not describe a model that is known.
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
        raise FuyouConfigError(
            f"--model {text!r} must be a Hugging Face config.json, gpt:layers,heads,hidden,vocab or a published size; "
            f"{_missing(text, path)}"
        )
    return _from_file(path)


def _missing(text: str, path: str) -> str:
    """Why there is no such model, and what may be meant."""
    sizes = ", ".join(model_shapes())
    if path != text:
        return f"there is no {path}"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text) and not text.endswith(".json"):
        return (
            f"there is no such file, and nothing is fetched from the Hub: save "
            f"https://huggingface.co/{text}/resolve/main/config.json and give its path"
        )
    size = re.fullmatch(r"(\d+(?:\.\d+)?)b", text.lower())
    if size is None or not float(size[1]):
        return f"there is no such file, and the sizes are {sizes}"
    near = min(model_shapes(), key=lambda name: abs(math.log(float(name[:-1]) / float(size[1]))))
    return f"{near} is the nearest of the sizes {sizes}; a model's own config.json is exact"


def _from_file(path: str) -> ModelSpec:
    from ds_fuyou.simulator.families import read_config

    try:
        with open(path, encoding="utf-8-sig") as file:
            config = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise FuyouConfigError(f"--model {path}: must be a readable JSON file, found {error}") from error
    if not isinstance(config, Mapping):
        raise FuyouConfigError(f"--model {path}: must hold a JSON object, found {type(config).__name__}")
    try:
        return read_config(config)
    except FuyouConfigError as error:
        raise FuyouConfigError(f"--model {path}: {error}") from error
