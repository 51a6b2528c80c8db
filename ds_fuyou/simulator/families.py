# SPDX-License-Identifier: Apache-2.0
"""Hugging Face ``config.json`` to :class:`ModelSpec`: which blocks a family is made of. No torch, no transformers.

``families.json`` has an entry a ``model_type``: what its blocks are made of (``like``: as another family, but for what
it says itself), and the values of keys that a config may leave out, as transformers has them. A value of a trait that
is text names the key that decides. What cannot be said so is done by a few lines here (``_ADJUSTED``, ``_TOWERS``,
``_PROJECTORS``). A family without an entry is refused: nothing is guessed.

Traits: ``gated`` (MLP), ``norms`` and ``norm_vectors``, ``normed_after``, ``qkv_bias``, ``out_bias``, ``mlp_bias``,
``head_bias``, ``qk_norm`` ("head": of a head's width, "width": of all heads') and ``qk_norm_if``, ``sinks``,
``fused_qkv`` and ``fused_up`` (one module), ``positions`` (learned ones: how many more than the config says),
``embedding_norm``, ``norm_copies`` (see below), ``rotated`` ("fused": queries and keys out of one module with values,
"part": of each head), ``windows``, ``latent``, ``experts``; ``parts``: the families of a stack and of its vision tower.

What a block keeps for backward is what autograd saves of transformers' own in bfloat16 with PyTorch's fused attention,
of batches without padding.
"""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ds_fuyou.errors import FuyouConfigError, shown
from ds_fuyou.planner.blocks import Attention, Block, Matrix, Mlp, Norms, block_of
from ds_fuyou.planner.model import MOST_LAYERS, MOST_SIZE, ModelSpec

__all__ = ["known_families", "read_config"]

_NORM_COPIES = {0: 2, 1: 4, 2: 0}
"""Bytes an element that a norm of so many vectors keeps beside 16 bits of its input and output: computed in fp32, and
scaled in 16 bits; PyTorch's own kernel keeps nothing. ``norm_copies`` says else of a family."""

_ACTIVATION_COPIES = {"gelu_new": 6, "gelu_fast": 12, "quick_gelu": 2, "relu": -2}
"""The same of functions of the MLP that are not one kernel; that of ReLU does not keep its input."""

_ROW_BYTES = 8
"""Of a row of a norm: mean and scale."""

_CHOICE_BYTES = 4 * 8 + 2 * 4
"""Of an expert that a token goes to: four numbers of places in int64, its weight and what that was made of in fp32."""

_ALIASES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "hidden": ("hidden_size", "n_embd", "d_model", "n_embed"),
    "vocab": ("vocab_size",),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "kv_heads": ("num_key_value_heads",),
    "positions": ("max_position_embeddings", "n_positions"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "active": ("num_experts_per_tok", "num_experts_per_token"),
    "channels": ("num_channels", "in_channels", "in_chans"),
    "window": ("sliding_window", "window_size"),
    "every": ("sliding_window_pattern", "_sliding_window_pattern"),
    "activation": ("hidden_act", "activation_function", "hidden_activation", "activation"),
    "dropout": (
        *("resid_pdrop", "resid_dropout", "residual_dropout"),
        *("hidden_dropout", "hidden_dropout_prob", "dropout"),
    ),
}


@lru_cache(maxsize=1)
def _families() -> Mapping[str, Mapping[str, Any]]:
    loaded: Mapping[str, Mapping[str, Any]] = json.loads(
        Path(__file__).with_name("families.json").read_text(encoding="utf-8")
    )
    return loaded


def known_families() -> tuple[str, ...]:
    """Every ``model_type`` that can stand at the top of a config or in its ``text_config``."""
    return tuple(name for name in _families() if name not in _TOWERS)


class _Config:
    """A family's traits, and the keys of a config as they are said, else as they are where nothing is said."""

    def __init__(self, family: str, given: Mapping[str, Any]) -> None:
        self.family = family
        self.given = given
        entry = _entry(family)
        self.traits: dict[str, Any] = {}
        while True:
            self.traits = {**entry, **self.traits}
            if "like" not in entry:
                break
            entry = {key: value for key, value in _families()[entry["like"]].items() if key != "defaults"}
        self._defaults: Mapping[str, Any] = self.traits.pop("defaults")

    def _found(self, key: str) -> tuple[str, Any]:
        for source in (self.given, self._defaults):
            for name in _ALIASES.get(key, (key,)):
                if name in source:
                    return name, source[name]
        return key, None

    def value(self, key: str, default: Any = None) -> Any:
        """Of a key or one of its other names; ``default`` where it is null or nowhere."""
        found = self._found(key)[1]
        return default if found is None else found

    def listed(self, key: str) -> Sequence[Any]:
        """A list; empty where it is null or nowhere."""
        found = self.value(key, ())
        if not isinstance(found, (list, tuple)):
            raise FuyouConfigError(f"{self.family}: {key} must be a list, found {shown(found)}")
        return found

    def size(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number; of two equal ones (of a side of an image), one of them."""
        name, value = self._found(key)
        value = default if value is None else value
        if isinstance(value, (list, tuple)) and len(value) == 2 and value[0] == value[1]:
            value = value[0]
        if value is None:
            names = ", ".join(_ALIASES.get(key, (key,)))
            raise FuyouConfigError(f"{self.family}: one of {names} must be there; is it a model's config?")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST_SIZE:
            what = "a positive whole number" if least else "a whole number"
            raise FuyouConfigError(f"{self.family}: {name} must be {what}, found {shown(value)}")
        return value

    def share(self, key: str) -> float:
        """Above 0, at most 1."""
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.001 <= value <= 1:
            raise FuyouConfigError(f"{self.family}: {key} must be above 0 and at most 1, found {shown(value)}")
        return float(value)

    def trait(self, name: str, default: Any = None) -> Any:
        """What the family says, or the config's key that it names."""
        value = self.traits.get(name, default)
        return bool(self.value(value, False)) if isinstance(value, str) else value


def _entry(family: str) -> Mapping[str, Any]:
    entry = _families().get(family)
    if entry is None:
        near = difflib.get_close_matches(family, _families(), n=3, cutoff=0.6)
        hint = f"nearest known are {', '.join(near)}" if near else f"known are {', '.join(known_families())}"
        raise FuyouConfigError(
            f"model_type {family[:200]!r} is not known; {hint}. If its blocks are like those of one of these, say that "
            f"model_type in a copy of the file; if they are like GPT's, plan for gpt:layers,heads,hidden,vocab"
        )
    return entry


def read_config(config: Mapping[str, Any]) -> ModelSpec:
    """The model that a config describes.

    Raises:
        FuyouConfigError: a family that is not known, a key that is missing or no size, or parts that are not modelled.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or not family:
        raise FuyouConfigError(f"model_type must name the model's family, found {shown(family)}")
    if config.get("is_encoder_decoder"):
        raise FuyouConfigError(
            f"{family}: an encoder beside a decoder (is_encoder_decoder) is not modelled; only one stack is"
        )
    if config.get("add_cross_attention"):
        raise FuyouConfigError(f"{family}: attention to another stack (add_cross_attention) is not modelled")
    name = "".join(each if each.isprintable() else "?" for each in str(config.get("_name_or_path") or family))
    parts = _entry(family).get("parts")
    if parts is None:
        return _stack(name, _Config(family, config))
    return _composed(name, _Config(family, config), parts)


def _composed(name: str, whole: _Config, parts: Sequence[str]) -> ModelSpec:
    """A stack with a vision tower and what joins both. Older files have the stack's keys at the top."""
    text, vision = (_nested(whole, key) for key in ("text_config", "vision_config"))
    flat = {key: value for key, value in whole.given.items() if key not in ("model_type", "vision_config")}
    stack = _Config(str(text.get("model_type", parts[0])), {**flat, **text})
    tower = _Config(str(vision.get("model_type", parts[1])), vision)
    if tower.family in (whole.family, "siglip", "clip") or tower.family not in _TOWERS:  # as files of before say it
        tower = _Config(parts[1], vision)
    tied = whole.given.get("tie_word_embeddings", text.get("tie_word_embeddings", whole.value("tie_word_embeddings")))
    found = _stack(name, stack, bool(tied))
    adjust = _ADJUSTED.get(tower.family)
    if adjust is not None:
        adjust(tower)
    blocks = sum(block.params for block in _blocks(tower))
    joined = _PROJECTORS[whole.family](whole, tower, found.hidden)
    return replace(found, other_params=found.other_params + joined, tower_params=blocks + _TOWERS[tower.family](tower))


def _nested(whole: _Config, key: str) -> Mapping[str, Any]:
    found = whole.given.get(key) or {}
    if not isinstance(found, Mapping):
        raise FuyouConfigError(f"{whole.family}: {key} must be an object, found {shown(found)}")
    return found


def _stack(name: str, config: _Config, tied: bool | None = None) -> ModelSpec:
    adjust = _ADJUSTED.get(config.family)
    others = 0 if adjust is None else adjust(config)
    blocks = _blocks(config)
    hidden, vocab = config.size("hidden"), config.size("vocab")
    width = config.size("word_embed_proj_dim", hidden)
    vectors = config.trait("norm_vectors", 1)
    others += vectors * hidden * (1 + config.trait("embedding_norm", False))
    if width != hidden:
        others += 2 * width * hidden
    positions = config.traits.get("positions")
    rows = vocab + (0 if positions is None else config.size("positions") + positions)
    is_tied = config.value("tie_word_embeddings", True) if tied is None else tied
    return ModelSpec(
        name,
        hidden,
        vocab,
        blocks,
        embedding_params=vocab * width + (rows - vocab) * hidden,
        head_params=0 if is_tied else vocab * width,
        other_params=others + (vocab if config.trait("head_bias", False) else 0),
    )


def _blocks(config: _Config) -> tuple[Block, ...]:
    """One object for each kind of block."""
    made: dict[tuple[int, bool], Block] = {}
    layers = config.size("layers")
    if layers > MOST_LAYERS:
        raise FuyouConfigError(f"{config.family}: there must be at most {MOST_LAYERS} layers, found {layers}")
    kinds = [(window, _has_experts(config, index)) for index, window in enumerate(_windows(config, layers))]
    for kind in dict.fromkeys(kinds):
        made[kind] = _block(config, *kind)
    return tuple(made[kind] for kind in kinds)


def _block(config: _Config, window: int, experts: bool) -> Block:
    hidden = config.size("hidden")
    attention = _latent(config, window) if config.trait("latent", False) else _grouped(config, window)
    mlp = _experts(config) if experts else _dense(config, config.size(_dense_width(config), 4 * hidden))
    count = config.traits.get("norms", 2)
    norms = Norms(
        count,
        config.trait("norm_vectors", 1),
        count > 2 or config.trait("normed_after", False),
        _norm_copies(config) * hidden + _ROW_BYTES,
    )
    masks = hidden if config.value("dropout") else 0
    attention = replace(attention, copied_bytes=attention.copied_bytes + masks)
    mlp = replace(mlp, copied_bytes=mlp.copied_bytes + masks)
    return block_of(hidden, attention, mlp, norms)


def _norm_copies(config: _Config) -> int:
    found: int = config.traits.get("norm_copies", _NORM_COPIES[config.trait("norm_vectors", 1)])
    return found


def _queries_and_keys(config: _Config, elements: int, rows: int) -> int:
    """What norms of so much keep, of which the outputs are not yet counted."""
    return (_norm_copies(config) + 2) * elements + _ROW_BYTES * rows


def _mlp_copies(config: _Config, width: int, gated: bool) -> int:
    """Where one half gates the other, its function's output is kept for the product."""
    return (_ACTIVATION_COPIES.get(str(config.value("activation")), 0) + 2 * gated) * width


def _dense_width(config: _Config) -> str:
    found: str = (config.traits.get("experts") or {}).get("dense_width", "intermediate")
    return found


def _grouped(config: _Config, window: int) -> Attention:
    hidden, heads = config.size("hidden"), config.size("heads")
    if config.value("head_dim") is None and hidden % heads:
        raise FuyouConfigError(f"{config.family}: hidden size {hidden} must be a multiple of the {heads} heads")
    kv_heads, head_dim = config.size("kv_heads", heads), config.size("head_dim", hidden // heads)
    bias = config.trait("qkv_bias", False)
    outputs = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    if config.trait("fused_qkv", False):
        outputs = [sum(outputs)]
    others, copied = heads if config.trait("sinks", False) else 0, 4 * heads  # a scale in fp32 for each row of scores
    kind, switch = config.traits.get("qk_norm"), config.traits.get("qk_norm_if")
    if kind is not None and (switch is None or config.value(switch)):
        vectors = config.traits.get("qk_norm_vectors", config.trait("norm_vectors", 1))
        others += vectors * (2 * head_dim if kind == "head" else (heads + kv_heads) * head_dim)
        copied += _queries_and_keys(config, (heads + kv_heads) * head_dim, heads + kv_heads if kind == "head" else 2)
    if "fused" in config.traits.get("rotated", ()):  # values hold on to what the one module made
        copied += 2 * (heads + kv_heads) * head_dim
    if "part" in config.traits.get("rotated", ()):  # joined heads lie otherwise, and what comes out is copied
        copied += 2 * heads * head_dim
    return Attention(
        tuple(Matrix(hidden, size, bias) for size in outputs),
        Matrix(heads * head_dim, hidden, config.trait("out_bias", False)),
        heads,
        head_dim,
        head_dim,
        window,
        others,
        copied,
    )


def _latent(config: _Config, window: int) -> Attention:
    """Keys and values of all heads out of one narrow vector, and queries, too, where they have one."""
    hidden, heads, rank = config.size("hidden"), config.size("heads"), config.size("kv_lora_rank")
    rope, nope = config.size("qk_rope_head_dim"), config.size("qk_nope_head_dim")
    value, bias = config.size("v_head_dim"), config.trait("qkv_bias", False)
    narrow = config.value("q_lora_rank")
    queries = heads * (rope + nope)
    before = [Matrix(hidden, queries)]
    others, copied = rank, 2 * queries + 4 * heads  # both parts of the keys are joined
    if narrow is not None:
        narrow = config.size("q_lora_rank")
        before, others = [Matrix(hidden, narrow, bias), Matrix(narrow, queries)], others + narrow
    before += [Matrix(hidden, rank + rope, bias), Matrix(rank, heads * (nope + value))]
    after = Matrix(heads * value, hidden, config.trait("out_bias", False))
    copied += _queries_and_keys(config, others, 2)
    return Attention(tuple(before), after, heads, rope + nope, value, window, others, copied)


def _dense(config: _Config, width: int) -> Mlp:
    hidden, bias = config.size("hidden"), config.trait("mlp_bias", False)
    gated = config.traits.get("gated", True)
    up = (Matrix(hidden, width, bias),) * (2 if gated else 1)
    if gated and config.trait("fused_up", False):
        up = (Matrix(hidden, 2 * width, bias),)
    return Mlp(up, (Matrix(width, hidden, bias),), gated, copied_bytes=_mlp_copies(config, width, gated))


def _experts(config: _Config) -> Mlp:
    """Routed experts, and a shared one that every token goes through. Of what goes into the former each has a copy, and
    what comes out is weighed.
    """
    says, hidden = config.traits["experts"], config.size("hidden")
    number, active = config.size("experts"), config.size("active")
    if active > number:
        raise FuyouConfigError(f"{config.family}: a token cannot go to {active} of {number} experts")
    width, bias = config.size(says["width"]), says.get("biases", False)
    stacked = {"bias": bias, "copies": number, "used": active, "linear": False}
    up, down = [Matrix(hidden, 2 * width, **stacked)], [Matrix(width, hidden, **stacked)]
    router = [Matrix(hidden, number, bias, linear=False)]
    copied: float = active * (_mlp_copies(config, width, True) + 4 * hidden + _CHOICE_BYTES) + 4 * number
    if says.get("chosen_in_fp32"):
        copied += 4 * hidden
    beside = config.size(says["shared_width"]) if "shared_width" in says else 0
    if "shared" in says:
        beside = width * config.size(says["shared"], 0, least=0)
    if beside:
        shared = _dense(config, beside)
        up, down, copied = [*up, *shared.up], [*down, *shared.down], copied + shared.copied_bytes
        if says.get("shared_gate"):
            router.append(Matrix(hidden, 1))
            copied += 2 * hidden
    return Mlp(tuple(up), tuple(down), True, tuple(router), copied)


def _has_experts(config: _Config, index: int) -> bool:
    says = config.traits.get("experts")
    if says is None or not config.value("experts"):
        return False
    named = config.listed(says.get("layers", ""))
    if named:
        return index in named
    first = config.size(says["first"], 0, least=0) if "first" in says else 0
    step = config.size(says["step"]) if "step" in says else 1
    return index >= first and (index + 1) % step == 0 and index not in config.listed(says.get("dense", ""))


def _windows(config: _Config, layers: int) -> list[int]:
    """Positions that attention of each block sees at most; 0: all."""
    says = config.traits.get("windows") or {}
    size = config.size(says.get("size", "window"), 0, least=0)
    named = config.listed("layer_types")
    if named:
        if len(named) < layers:
            raise FuyouConfigError(f"{config.family}: layer_types must name all {layers} layers, found {len(named)}")
        wide = {"full_attention": 0, "sliding_attention": size, "chunked_attention": size, "global": 0, "local": size}
        for kind in named:
            if not isinstance(kind, str) or kind not in wide:
                raise FuyouConfigError(f"{config.family}: blocks of {shown(kind)} are not modelled; only attention is")
        return [wide[kind] for kind in named[:layers]]
    if not says or ("if" in says and not config.value(says["if"])):
        return [0] * layers
    if "from" in says:
        first = config.size(says["from"], 0, least=0)
        return [size if index >= first else 0 for index in range(layers)]
    every = says["every"]
    if isinstance(every, str):
        every = config.size("every" if every == "sliding_window_pattern" else every, says.get("default", 0), least=0)
    return [0 if every and (index + 1) % every == 0 else size for index in range(layers)]


def _falcon(config: _Config) -> int:
    new, parallel = config.value("new_decoder_architecture"), config.value("parallel_attn")
    heads = config.size("heads")
    kv_heads = config.size("num_kv_heads", heads) if new else 1 if config.value("multi_query") else heads
    norms = config.size("num_ln_in_parallel_attn", 2 if new else 1)
    config.given = {**config.given, "num_key_value_heads": kv_heads}
    config.traits["norms"] = norms if parallel else 2
    return 0


def _one_norm(config: _Config) -> int:
    config.traits["norms"] = 1 if config.value("use_parallel_residual") else 2
    config.traits["qk_norm_vectors"] = 1
    return 0


def _opt(config: _Config) -> int:
    """Without a last norm where norms come after; without weights of norms where the config says so."""
    if not config.value("layer_norm_elementwise_affine"):
        config.traits["norm_vectors"] = 0
    removed = not config.value("do_layer_norm_before") or config.value("_remove_final_layer_norm", False)
    return -config.trait("norm_vectors") * config.size("hidden") if removed else 0


def _bigcode(config: _Config) -> int:
    if config.value("multi_query"):
        config.given = {**config.given, "num_key_value_heads": 1}
    return 0


def _gpt_neo(config: _Config) -> int:
    types = config.value("attention_types", [[["global", "local"], 12]])
    try:
        every = (kind for kinds, count in types for _ in range(count) for kind in kinds)
        named = list(itertools.islice(every, MOST_LAYERS))
    except (TypeError, ValueError):
        raise FuyouConfigError(f"gpt_neo: attention_types must be [[kinds, times]], found {shown(types)}") from None
    config.given = {**config.given, "layer_types": named}
    return 0


def _encoder(config: _Config) -> int:
    """Segments, and a head of a matrix, a norm and a bias, two where it is not tied; the stack itself ends without a
    norm.
    """
    hidden = config.size("hidden")
    num_biases = 1 if config.value("tie_word_embeddings", True) else 2
    return (config.size("type_vocab_size") + hidden + 1) * hidden + num_biases * config.size("vocab")


def _qwen2_vision(config: _Config) -> int:
    """Its hidden size is what it gives to the stack."""
    width, ratio = config.size("embed_dim"), config.size("mlp_ratio")
    sizes = {"hidden_size": width, "intermediate_size": ratio * width, "out_hidden_size": config.size("hidden")}
    config.given = {**config.given, **sizes}
    return 0


_ADJUSTED: dict[str, Callable[[_Config], int]] = {
    "falcon": _falcon,
    "stablelm": _one_norm,
    "opt": _opt,
    "gpt_bigcode": _bigcode,
    "gpt_neo": _gpt_neo,
    "qwen2_vl_vision": _qwen2_vision,
    "bert": _encoder,
    "roberta": _encoder,
}
"""What a config decides about a family's blocks; what the model has beside them and the usual last norm."""


def _patch(config: _Config, width: int, frames: int = 1) -> int:
    return config.size("channels") * frames * config.size("patch_size") ** 2 * width


def _places(config: _Config) -> int:
    return (config.size("image_size") // config.size("patch_size")) ** 2


def _clip(config: _Config) -> int:
    """A class token; a norm before the blocks and one behind."""
    width = config.size("hidden")
    return _patch(config, width) + (_places(config) + 2 + 4) * width


def _siglip(config: _Config) -> int:
    width = config.size("hidden")
    embedding = _patch(config, width) + (1 + _places(config) + 2) * width
    if config.family != "siglip_vision_model" or not config.value("vision_use_head"):
        return embedding
    pooled = Matrix(width, 4 * width, True).params + 3 * width
    inner = config.size("intermediate")
    return embedding + pooled + Matrix(width, inner, True).params + Matrix(inner, width, True).params


def _qwen2_vl(config: _Config) -> int:
    return _patch(config, config.size("hidden"), config.size("temporal_patch_size"))


def _qwen3_vl(config: _Config) -> int:
    width = config.size("hidden")
    return _qwen2_vl(config) + width + config.size("num_position_embeddings") * width


def _pixtral(config: _Config) -> int:
    width = config.size("hidden")
    return _patch(config, width) + width


def _llama4_vision(config: _Config) -> int:
    """Two matrices behind the pixel shuffle count as the tower's."""
    inner, outer = config.size("projector_input_dim"), config.size("projector_output_dim")
    return _clip(config) + config.size("intermediate") * inner + outer * outer


def _internvl_vision(config: _Config) -> int:
    """Each block scales both of its outputs by a vector."""
    width = config.size("hidden")
    return _patch(config, width) + (2 + _places(config) + 1) * width + 2 * config.size("layers") * width


_TOWERS: dict[str, Callable[[_Config], int]] = {
    "clip_vision_model": _clip,
    "siglip_vision_model": _siglip,
    "idefics3_vision": _siglip,
    "smolvlm_vision": _siglip,
    "qwen2_vl_vision": _qwen2_vl,
    "qwen2_5_vl_vision": _qwen2_vl,
    "qwen3_vl_vision": _qwen3_vl,
    "pixtral": _pixtral,
    "llama4_vision_model": _llama4_vision,
    "internvl_vision": _internvl_vision,
}
"""Parameters of a vision tower beside its blocks."""


def _pair(inputs: int, hidden: int, bias: bool) -> int:
    return Matrix(inputs, hidden, bias).params + Matrix(hidden, hidden, bias).params


def _llava(whole: _Config, tower: _Config, hidden: int) -> int:
    layers = whole.value("vision_feature_layer")
    inputs = tower.size("hidden") * (len(layers) if isinstance(layers, Sequence) else 1)
    line = hidden if whole.family == "llava_next" else 0  # the end of a row of tiles
    return line + _pair(inputs, hidden, bool(whole.value("multimodal_projector_bias")))


def _merged(norm: int, width: int, merge: int, out: int) -> int:
    """A norm, and two matrices over ``merge`` x ``merge`` neighbours."""
    inner = merge * merge * width
    return norm + Matrix(inner, inner, True).params + Matrix(inner, out, True).params


def _qwen_merger(whole: _Config, tower: _Config, hidden: int) -> int:
    width, merge, out = tower.size("hidden"), tower.size("spatial_merge_size"), tower.size("out_hidden_size")
    if tower.family == "qwen2_5_vl_vision":
        return _merged(width, width, merge, out)
    deep = len(tower.listed("deepstack_visual_indexes"))
    return _merged(2 * width, width, merge, out) + deep * _merged(2 * merge * merge * width, width, merge, out)


def _gemma3(whole: _Config, tower: _Config, hidden: int) -> int:
    return tower.size("hidden") * (hidden + 1)


def _mistral3(whole: _Config, tower: _Config, hidden: int) -> int:
    width, merge = tower.size("hidden"), whole.size("spatial_merge_size")
    layers = whole.value("vision_feature_layer")
    inputs = width * (len(layers) if isinstance(layers, Sequence) else 1)
    bias = bool(whole.value("multimodal_projector_bias"))
    return width + width * merge * merge * width + _pair(inputs, hidden, bias)


def _llama4(whole: _Config, tower: _Config, hidden: int) -> int:
    return tower.size("vision_output_dim") * hidden


def _internvl(whole: _Config, tower: _Config, hidden: int) -> int:
    inputs = tower.size("hidden") * int(1 / whole.share("downsample_ratio")) ** 2
    return 2 * inputs + _pair(inputs, hidden, True)


def _idefics3(whole: _Config, tower: _Config, hidden: int) -> int:
    return tower.size("hidden") * whole.size("scale_factor") ** 2 * hidden


def _paligemma(whole: _Config, tower: _Config, hidden: int) -> int:
    return Matrix(tower.size("hidden"), tower.size("projection_dim", whole.size("projection_dim")), True).params


_PROJECTORS: dict[str, Callable[[_Config, _Config, int], int]] = {
    "llava": _llava,
    "llava_next": _llava,
    "qwen2_vl": _qwen_merger,
    "qwen2_5_vl": _qwen_merger,
    "qwen3_vl": _qwen_merger,
    "gemma3": _gemma3,
    "mistral3": _mistral3,
    "llama4": _llama4,
    "internvl": _internvl,
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
    "paligemma": _paligemma,
}
"""Parameters of what joins a tower and the stack; trained with the stack."""
