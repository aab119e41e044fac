"""The attention of a model, from the config.json of a Hugging Face checkpoint."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..problem import DTYPES
from .shapes import Attention

LENGTHS = ("max_position_embeddings", "n_positions")
"""Fields that hold the longest sequence of a model."""


class ConfigError(ValueError):
    """A configuration that cannot be read, or that says too little; the message names the file and the field."""


def read_config(path) -> tuple[list[Attention], int | None]:
    """The kinds of attention layers of a model, and the length of the longest sequence it was made for.

    Parameters
    ----------
    path : str or os.PathLike
        A config.json, or the folder that holds it.

    Raises
    ------
    ConfigError
        For a file that holds no configuration, an architecture that is not known here, and a field that is missing or makes no sense.
    OSError
        When there is no such file.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} must hold the JSON of a model's configuration: {error}") from None
    if not isinstance(told, dict):
        raise ConfigError(f"{path} must hold a JSON object; got {type(told).__name__}")
    config = Config(path, told)
    if isinstance(told.get("text_config"), dict):  # a model of images and text
        config = Config(path, {name: told[name] for name in ("dtype", "torch_dtype") if name in told} | told["text_config"])
    kind = config.text("model_type")
    if kind not in ARCHITECTURES:
        raise ConfigError(f"{path}: model_type must be one of {', '.join(ARCHITECTURES)}; got {kind!r}. Give the shapes by --heads, --head-dim, ...")
    layers = ARCHITECTURES[kind](config)
    longest = next((config.number(name) for name in LENGTHS if name in config.told), None)
    return layers, longest


class Config:
    """The fields of a configuration; what is asked for and is not there is an error that names it."""

    def __init__(self, path: Path, told: dict[str, Any]):
        self.path, self.told = path, told

    def _wrong(self, name, wanted):
        got = f"got {self.told[name]!r}" if name in self.told else "it is missing"
        return ConfigError(f"{self.path}: {name} must be {wanted}; {got}")

    def text(self, name: str) -> str:
        x = self.told.get(name)
        if not isinstance(x, str):
            raise self._wrong(name, "a string")
        return x

    def number(self, name: str) -> int:
        x = self.told.get(name)
        if isinstance(x, bool) or not isinstance(x, int) or x < 1:
            raise self._wrong(name, "a positive integer")
        return x

    def number_or_none(self, name: str, *, absent: bool = True) -> int | None:
        """The same, or null; a field that is not there is null where ``absent`` says so."""
        if name in self.told or not absent:
            return None if name in self.told and self.told[name] is None else self.number(name)
        return None

    def positive_or_none(self, name: str) -> float | None:
        x = self.told.get(name)
        if x is None:
            return None
        if isinstance(x, bool) or not isinstance(x, (int, float)) or not 0 < x < math.inf:
            raise self._wrong(name, "a positive number or null")
        return float(x)

    def flag(self, name: str, absent: bool) -> bool:
        x = self.told.get(name, absent)
        if not isinstance(x, bool):
            raise self._wrong(name, "true or false")
        return x

    @property
    def dtype(self) -> str:
        for name in ("dtype", "torch_dtype"):
            if self.told.get(name) is not None:
                found = self.text(name).removeprefix("torch.")
                if found not in DTYPES:
                    raise self._wrong(name, f"one of {', '.join(DTYPES)}")
                return found
        return "float32"  # what transformers loads such a model in

    def plain(
        self, *, kv_heads_absent: bool = False, head_dim: str | None = "absent", hidden="hidden_size", heads="num_attention_heads"
    ) -> Attention:
        """Heads and their size; ``head_dim`` says whether that field must be there, may be absent or is not read."""
        count, width = self.number(heads), None
        if head_dim is not None:
            width = self.number_or_none("head_dim", absent=head_dim == "absent")
        if width is None:
            size = self.number(hidden)
            if size % count:
                raise ConfigError(f"{self.path}: {hidden} must be a multiple of {heads} where there is no head_dim; got {size} and {count}")
            width = size // count
        kv_heads = self.number_or_none("num_key_value_heads", absent=kv_heads_absent) or count
        if count % kv_heads:
            raise ConfigError(f"{self.path}: {heads} must be a multiple of num_key_value_heads; got {count} and {kv_heads}")
        return Attention(count, kv_heads, width, width, self.dtype)


def _window(size: int | None):
    """A sliding window of so many keys, the query's own included."""
    return None if size is None else (size - 1, None)


def _layered(config: Config, attention: Attention, sliding_when_untold) -> list[Attention]:
    """Layers with a window and layers without, by ``layer_types``, or by a function of the layer's number where that is not told."""
    count, window = config.number("num_hidden_layers"), config.number_or_none("sliding_window")
    kinds = config.told.get("layer_types")
    if kinds is None:
        sliding = sum(map(bool, map(sliding_when_untold, range(count))))
    elif isinstance(kinds, list) and len(kinds) == count and set(kinds) <= {"sliding_attention", "full_attention"}:
        sliding = kinds.count("sliding_attention")
    else:
        raise ConfigError(f"{config.path}: layer_types must name sliding_attention or full_attention for each of {count} layers; got {kinds!r}")
    if not sliding or window is None:
        if sliding and kinds is not None:
            raise ConfigError(f"{config.path}: sliding_window must be a positive integer where layers are sliding_attention; it is null or missing")
        return [attention]
    slides = replace(attention, window=_window(window))
    if sliding == count:
        return [slides]
    return [replace(slides, label=f"{sliding} sliding layers"), replace(attention, label=f"{count - sliding} full layers")]


def _llama(config):
    return [config.plain(kv_heads_absent=True)]


def _phi3(config):
    return [replace(config.plain(kv_heads_absent=True, head_dim=None), window=_window(config.number_or_none("sliding_window")))]


def _mistral(config):
    return [replace(config.plain(), window=_window(config.number_or_none("sliding_window", absent=False)))]


def _mixtral(config):
    return [replace(config.plain(), window=_window(config.number_or_none("sliding_window")))]


def _qwen(config, head_dim):
    attention = config.plain(head_dim=head_dim)
    if not config.flag("use_sliding_window", False):
        return [attention]
    first = config.told.get("max_window_layers")
    if config.told.get("layer_types") is None and (isinstance(first, bool) or not isinstance(first, int)):
        raise config._wrong("max_window_layers", "an integer where use_sliding_window is true and there are no layer_types")
    return _layered(config, attention, lambda layer: layer >= first)


def _qwen3_moe(config):
    attention = config.plain()
    return _layered(config, attention, lambda layer: True) if config.flag("use_sliding_window", False) else [attention]


def _gemma(config):
    return [config.plain(head_dim="needed")]


def _gemma_scaled(config):
    if config.told.get("use_bidirectional_attention"):
        raise ConfigError(f"{config.path}: use_bidirectional_attention must be false; such models are not known here")
    scalar = config.positive_or_none("query_pre_attn_scalar")
    if scalar is None:
        raise config._wrong("query_pre_attn_scalar", "a positive number")
    return replace(config.plain(head_dim="needed"), scale=scalar**-0.5, softcap=config.positive_or_none("attn_logit_softcapping"))


def _gemma2(config):
    if "attn_logit_softcapping" not in config.told:
        raise config._wrong("attn_logit_softcapping", "a positive number or null")
    return _layered(config, _gemma_scaled(config), lambda layer: (layer + 1) % 2)


def _gemma3(config):
    pattern = config.number_or_none("sliding_window_pattern") or config.number_or_none("_sliding_window_pattern") or 6
    return _layered(config, _gemma_scaled(config), lambda layer: (layer + 1) % pattern)


def _gpt_oss(config):
    return _layered(config, replace(config.plain(head_dim="needed"), sinks=True), lambda layer: (layer + 1) % 2)


def _gpt2(config):
    if config.flag("scale_attn_by_inverse_layer_idx", False):
        raise ConfigError(f"{config.path}: scale_attn_by_inverse_layer_idx must be false; a scale for each layer is not known here")
    scale = None if config.flag("scale_attn_weights", True) else 1.0
    return [replace(config.plain(kv_heads_absent=True, head_dim=None, hidden="n_embd", heads="n_head"), scale=scale)]


def _gpt_neo(config):
    """Scores that are not scaled; ``attention_types`` is a list of kinds of layers and how often they repeat."""
    attention = replace(config.plain(kv_heads_absent=True, head_dim=None, heads="num_heads"), scale=1.0)
    told = config.told.get("attention_types")
    try:
        kinds = [kind for some, times in told for kind in some * times]
    except (TypeError, ValueError):
        kinds = []
    if not kinds or not set(kinds) <= {"local", "global"}:
        raise config._wrong("attention_types", 'a list such as [[["global", "local"], 12]]')
    local = replace(attention, window=_window(config.number("window_size"))) if "local" in kinds else None
    if "global" not in kinds:
        return [local]
    if local is None:
        return [attention]
    count = kinds.count("local")
    return [replace(local, label=f"{count} local layers"), replace(attention, label=f"{len(kinds) - count} global layers")]


def _granite(config):
    scale = config.positive_or_none("attention_multiplier")
    if scale is None:
        raise config._wrong("attention_multiplier", "a positive number")
    return [replace(config.plain(kv_heads_absent=True), scale=scale)]


def _cohere2(config):
    pattern = config.number_or_none("sliding_window_pattern") or config.number_or_none("_sliding_window_pattern") or 4
    return _layered(config, config.plain(kv_heads_absent=True), lambda layer: (layer + 1) % pattern)


def _plain_heads(config):
    return [config.plain(kv_heads_absent=True, head_dim=None)]


def _deepseek(config):
    """Multi-head latent attention: keys and values of heads of their own in prefill, a shared latent cache with a rotary part in decoding."""
    heads, rotary, rank = config.number("num_attention_heads"), config.number("qk_rope_head_dim"), config.number("kv_lora_rank")
    width = config.number("qk_nope_head_dim") + rotary
    scale = width**-0.5 * _yarn(config)
    attention = Attention(heads, heads, width, config.number("v_head_dim"), config.dtype, scale=scale)
    return [replace(attention, latent=(rank + rotary, rank), latent_scale=scale)]


def _yarn(config) -> float:
    """What YaRN multiplies the scale by."""
    told = config.told.get("rope_parameters") or config.told.get("rope_scaling") or {}
    factor, dims = told.get("factor"), told.get("mscale_all_dim")
    if told.get("rope_type", told.get("type", "default")) == "default" or not dims:
        return 1.0
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 0:
        raise ConfigError(f"{config.path}: factor of rope_scaling must be a positive number; got {factor!r}")
    return (0.1 * dims * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0


ARCHITECTURES = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "starcoder2": _mixtral,
    "olmo2": _llama,
    "granite": _granite,
    "cohere2": _cohere2,
    "qwen2": lambda config: _qwen(config, "absent"),
    "qwen3": lambda config: _qwen(config, "needed"),
    "qwen3_moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "gpt_neo": _gpt_neo,
    "gpt_neox": _plain_heads,
    "opt": _plain_heads,
    "phi": _plain_heads,
    "gpt_oss": _gpt_oss,
    "phi3": _phi3,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}
"""What reads the configuration of each ``model_type``."""
