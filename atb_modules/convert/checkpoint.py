"""Checkpoint: a directory or a GGUF file as our configuration and our weights, read one at a time."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atb_modules.attention.rope import RotaryLayout, convert_rotary_weight
from atb_modules.checks import check_path
from atb_modules.models.config import ModelConfig

from .directory import (
    commonest_dtype,
    counted,
    listed,
    named,
    plain_names,
    read_object,
    same_tensors,
    with_end_tokens,
)
from .families import families_text, family_of_gguf, family_of_model_type
from .family import Family, canonical_names, canonical_shape, gguf_name, hf_name
from .safetensors_files import SafetensorsSource
from .source import ConfigSource
from .tensors import TensorSource

logger = logging.getLogger("atb_modules.convert")

# What stands before a text model's keys in the layouts that checkpoints come in.
_LAYOUTS = ("model.", "", "language_model.model.", "model.language_model.")
_FREQUENCIES = "rope_freqs.weight"


class Checkpoint:
    """Weights and configuration of a model, opened and checked; no weight has been read yet.

    Attributes:
        config: what the model computes. `tie_word_embeddings` says what is stored: a head of its own is kept
            as one although the file says tied.
        family: the family it belongs to.
        dtype: dtype of most stored weights (float32 for a GGUF).
        unused: stored tensors that the model has no place for, outside of its layers.
    """

    def __init__(
        self,
        path: Path,
        family: Family,
        config: ModelConfig,
        source: TensorSource,
        stored: dict[str, str],
        known: Iterable[str] = (),
    ) -> None:
        self.path = path
        self.family = family
        self.source = source
        self._stored = stored
        self.config = self._settle_head(config)
        self._check_names(set(known))
        self.dtype = commonest_dtype(source.infos[name] for name in self._stored.values())

    def _settle_head(self, config: ModelConfig) -> ModelConfig:
        """A stored head is used; a missing one is the embedding, if the file says so."""
        head = self._stored["lm_head.weight"]
        if head not in self.source.infos:
            if not config.tie_word_embeddings:
                raise ValueError(f"{self.path}: the tensor {head!r} is missing, and tie_word_embeddings is false")
            del self._stored["lm_head.weight"]
        elif config.tie_word_embeddings and same_tensors(self.source, self._stored["embed.weight"], head):
            del self._stored["lm_head.weight"]
        else:
            return replace(config, tie_word_embeddings=False)
        return config

    def _check_names(self, known: set[str]) -> None:
        infos = self.source.infos
        missing = [name for name in self._stored.values() if name not in infos]
        if missing:
            raise ValueError(f"{self.path}: {counted(missing, 'tensor')} missing: {listed(missing)}")
        for ours, name in self._stored.items():
            shape = canonical_shape(self.config, ours)
            if infos[name].shape != shape:
                raise ValueError(
                    f"{infos[name].path}: tensor {name!r} has shape {infos[name].shape}; the configuration makes "
                    f"it {shape}"
                )
        unused = sorted(set(infos) - set(self._stored.values()) - known)
        inside = [name for name in unused if "layers." in name or name.startswith("blk.")]
        inside = [name for name in inside if not name.endswith("rotary_emb.inv_freq")]
        if inside:
            raise ValueError(
                f"{self.path}: the configuration has no place for {counted(inside, 'tensor')} of its layers: "
                f"{listed(inside)}"
            )
        self.unused = tuple(unused)
        if unused:
            logger.warning("%s: %s not used: %s", self.path, counted(unused, "tensor"), listed(unused))

    def names(self) -> list[str]:
        """Canonical names of all weights that there are."""
        return list(self._stored)

    def read_into(self, name: str, out: Tensor) -> None:
        """Copies a weight by its canonical name into `out`, in our conventions."""
        self.source.read_into(self._stored[name], out)


class GGUFCheckpoint(Checkpoint):
    """A GGUF: its q and k may be turned, and its norms may have an offset added."""

    def read_into(self, name: str, out: Tensor) -> None:
        super().read_into(name, out)
        part = name.rsplit(".", 2)[-2]
        if self.family.gguf_permuted and part in ("q_proj", "k_proj"):
            heads = self.config.num_heads if part == "q_proj" else self.config.num_kv_heads
            rotary = self.config.rotary[0]
            turned = rotary.rotary_dim(self.config.head_dim)
            out.copy_(convert_rotary_weight(out, heads, RotaryLayout.INTERLEAVED, RotaryLayout.HALF, turned))
        elif self.family.gguf_norm_offset and part.endswith("norm"):
            out.sub_(self.family.gguf_norm_offset)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a directory with config.json and safetensors, or a GGUF file.

    Raises:
        FileNotFoundError: the path, or a file that it names, is not there.
        ValueError: unknown architecture, a missing or wrong key, a missing tensor, a damaged file; the
            message names the file, and the key or tensor.
    """
    check_path("path", path)
    path = Path(path)
    if path.is_dir():
        return _open_directory(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if path.suffix != ".gguf":
        raise ValueError(f"{path}: allowed: a directory with config.json, or a .gguf file")
    return _open_gguf(path)


def _open_directory(path: Path) -> Checkpoint:
    values = read_object(path / "config.json")
    source = ConfigSource(values, str(path / "config.json"))
    model_type = source.word("model_type", "")
    family = family_of_model_type(model_type)
    if family is None:
        architectures = values.get("architectures") or ["unknown"]
        raise source.error(
            f"model_type {model_type!r} ({', '.join(map(str, architectures))}) is not supported; "
            f"allowed: {families_text()}"
        )
    config = named(source, lambda: _stretched(family.config(source)))
    config = replace(config, eos_token_ids=with_end_tokens(config.eos_token_ids, path))
    tensors = SafetensorsSource.from_directory(path)
    plain = plain_names(tensors)
    wanted = [*canonical_names(replace(config, tie_word_embeddings=True)), "lm_head.weight"]
    layout = next((p for p in _LAYOUTS if f"{p}embed_tokens.weight" in plain), "model.")
    stored = {}
    for name in wanted:
        foreign = hf_name(family, name)
        if foreign.startswith("model."):
            foreign = layout + foreign.removeprefix("model.")
        elif layout.startswith("language_model."):
            foreign = "language_model." + foreign
        stored[name] = plain.get(foreign, foreign)
    return Checkpoint(path, family, config, tensors, stored)


def _stretched(config: ModelConfig) -> ModelConfig:
    """Dynamic NTK takes max_position_embeddings for the trained length and serves `factor` times as many."""
    factors = [entry.scaling.factor for entry in config.rotary if entry.scaling and entry.scaling.kind == "dynamic"]
    return (
        replace(config, max_positions=int(min(config.max_positions * max(1.0, *factors), 2.0**62)))
        if factors
        else config
    )


def _open_gguf(path: Path) -> Checkpoint:
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(f"{path} is a GGUF; reading it needs the package gguf: pip install 'atb-modules[gguf]'")
    # An extra: only GGUF files need it.
    from .gguf_files import GGUFSource

    tensors = GGUFSource(path)
    metadata: dict[str, Any] = dict(tensors.metadata)
    source = ConfigSource(metadata, str(path))
    arch = source.word("general.architecture", "")
    family = family_of_gguf(arch)
    if family is None or family.gguf_config is None:
        raise source.error(f"general.architecture {arch!r} is not supported; allowed: {families_text(gguf=True)}")
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = [source.token_ids(f"tokenizer.ggml.{key}") for key in keys]
    metadata["eos_token_ids"] = list(dict.fromkeys(token for ids in ends for token in ids))
    embed = tensors.infos.get("token_embd.weight")
    if embed is None:
        raise source.error("the tensor 'token_embd.weight' is missing")
    metadata["vocab_size"] = embed.shape[0]
    # Files without a head are tied; one whose head was lost on the way cannot be told from them.
    metadata["tied"] = "output.weight" not in tensors.infos
    read_config = family.gguf_config
    config = named(source, lambda: read_config(source, arch))
    wanted = [*canonical_names(replace(config, tie_word_embeddings=True)), "lm_head.weight"]
    stored = {name: gguf_name(family, name) for name in wanted}
    if _FREQUENCIES in tensors.infos:
        read = config
        config = named(source, lambda: _with_frequencies(read, tensors))
    return GGUFCheckpoint(path, family, config, tensors, stored, known=(_FREQUENCIES,))


def _with_frequencies(config: ModelConfig, tensors: TensorSource) -> ModelConfig:
    """Llama 3.1 files carry the divisors of the rotary frequencies as a tensor instead of a rule."""
    info = tensors.infos[_FREQUENCIES]
    count = config.rotary[0].rotary_dim(config.head_dim) // 2
    if info.shape != (count,):
        raise ValueError(f"{info.path}: tensor {_FREQUENCIES!r} has shape {info.shape}; allowed: ({count},)")
    factors = torch.empty(count)
    tensors.read_into(_FREQUENCIES, factors)
    if not bool((factors > 0).all()):
        raise ValueError(f"{info.path}: tensor {_FREQUENCIES!r} has values that are not positive")
    rotary = tuple(replace(entry, frequency_factors=tuple(factors.tolist())) for entry in config.rotary)
    return replace(config, rotary=rotary)
