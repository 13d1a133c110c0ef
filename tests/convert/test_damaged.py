"""Damaged and hostile files: an error that names the file and the tensor, before any model is returned."""

import json
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from atb_modules.convert import open_checkpoint
from atb_modules.convert.safetensors_files import read_header
from atb_modules.models.loading import load_inference_model, load_model


@pytest.fixture
def sharded(write_checkpoint):
    """A model in six shards with an index."""
    directory, _, tensors = write_checkpoint()
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for shard in range(6):
        file = f"model-{shard + 1:05d}-of-00006.safetensors"
        part = {name: tensors[name] for name in names[shard::6]}
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory, tensors, weight_map


class TestShards:
    def test_whole(self, sharded, write_checkpoint):
        directory, tensors, _ = sharded
        single = write_checkpoint({}, tensors, "single")[0]
        ids = torch.tensor([[1, 2, 3]])
        assert torch.equal(load_model(directory)(ids).logits, load_model(single)(ids).logits)

    def test_missing_shard(self, sharded):
        directory, _, _ = sharded
        (directory / "model-00002-of-00006.safetensors").unlink()
        with pytest.raises(FileNotFoundError, match=r"'model-00002-of-00006.safetensors', which is not there"):
            load_model(directory)

    def test_cut_shard(self, sharded):
        directory, _, weight_map = sharded
        path = directory / "model-00003-of-00006.safetensors"
        path.write_bytes(path.read_bytes()[:-4096])
        with pytest.raises(ValueError, match=r"model-00003-of-00006.safetensors: tensor '.*cut short") as raised:
            load_model(directory)
        named = str(raised.value).split("'")[1]
        assert weight_map[named] == path.name

    def test_index_that_promises_too_much(self, sharded):
        directory, _, weight_map = sharded
        index = directory / "model.safetensors.index.json"
        weight_map["model.layers.9.extra"] = "model-00001-of-00006.safetensors"
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ValueError, match=r"tensor 'model.layers.9.extra' is not in 'model-00001"):
            load_model(directory)
        index.write_text("[]")
        with pytest.raises(ValueError, match="not an index with a weight_map"):
            load_model(directory)

    def test_index_that_leaves_the_directory(self, sharded):
        directory, _, weight_map = sharded
        weight_map["model.norm.weight"] = "../model.safetensors"
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(FileNotFoundError, match=r"'../model.safetensors', which is not there"):
            load_model(directory)

    def test_empty_directory(self, write_checkpoint, tmp_path):
        directory, _, _ = write_checkpoint()
        (directory / "model.safetensors").unlink()
        with pytest.raises(FileNotFoundError, match=r"no .*safetensors file is in this directory"):
            load_model(directory)
        empty = tmp_path / "empty"
        empty.mkdir()
        with pytest.raises(FileNotFoundError, match=r"config.json does not exist"):
            load_model(empty)
        with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
            load_model(tmp_path / "nowhere")


def write_raw(path, header, data=b"", length=None):
    raw = json.dumps(header).encode() if not isinstance(header, bytes) else header
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "length", "message"),
    [
        ({}, 1 << 60, "the header claims 1152921504606846976 bytes; the file has"),
        (b"{", None, "the header is not JSON"),
        (b"[]", None, "the header is a list"),
        ({"a": 3}, None, "tensor 'a': the header has no dtype, shape and data_offsets"),
        ({"a": {**GOOD, "dtype": "F3"}}, None, "tensor 'a': dtype is 'F3'; allowed: F64"),
        ({"a": {**GOOD, "dtype": ["F32"]}}, None, r"tensor 'a': dtype is \['F32'\]; allowed: F64"),
        (b"[" * 100_000, None, "the header is not JSON that can be read: it is nested too deeply"),
        ({"a": {**GOOD, "data_offsets": [-8, 0]}}, None, r"tensor 'a': data_offsets is \[-8, 0\]; allowed"),
        ({"a": {**GOOD, "data_offsets": [8, 0]}}, None, r"tensor 'a': data_offsets is \[8, 0\]; allowed"),
        ({"a": {**GOOD, "data_offsets": [0, 1 << 62]}}, None, "tensor 'a' ends at byte .*cut short"),
        ({"a": {**GOOD, "shape": [3]}}, None, r"tensor 'a': shape \[3\] of F32 takes 12 bytes, it has 8"),
        ({"a": {**GOOD, "shape": [True]}}, None, "tensor 'a': shape is .*allowed: a list of integers"),
        ({"a": GOOD, "b": {**GOOD, "data_offsets": [4, 12]}}, None, "tensors 'a' and 'b' overlap"),
    ],
)
def test_hostile_safetensors(tmp_path, header, length, message):
    path = write_raw(tmp_path / "bad.safetensors", header, bytes(16), length)
    with pytest.raises(ValueError, match=message) as raised:
        read_header(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "the file is not JSON that can be read: it is nested too deeply"),
        ('{"model_type": "llama"', "the file is not JSON: "),
        ("[]", "holds a list; allowed: an object"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; allowed: a finite number"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf; allowed: a finite number"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 10+; allowed: a finite number"),
        ({"rms_norm_eps": -1e-5}, "norm_eps is -1e-05; allowed: a finite number of at least 0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor is 0.0; allowed: a positive number"),
    ],
)
def test_hostile_config(write_checkpoint, text, message):
    directory, _, _ = write_checkpoint()
    path = directory / "config.json"
    if isinstance(text, dict):
        text = json.dumps(json.loads(path.read_text()) | text)
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as raised:
        load_model(directory)
    assert str(raised.value).startswith(str(path))


def test_dynamic_rotary_goes_past_the_trained_length(write_checkpoint):
    directory, _, _ = write_checkpoint()
    path = directory / "config.json"
    scaling = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.5}, "max_position_embeddings": 16}
    path.write_text(json.dumps(json.loads(path.read_text()) | scaling))
    model = load_model(directory)
    assert model.config.max_positions == 40 and model.config.rotary[0].scaling.original_max_positions == 16
    assert model(torch.zeros(1, 40, dtype=torch.long)).logits.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, "float32"])
def test_dtypes_of_no_parameter(write_checkpoint, dtype):
    with pytest.raises(ValueError, match=f"dtype is {dtype!r}; allowed: torch.float32"):
        load_model(write_checkpoint()[0], dtype=dtype)


def test_integer_weights_are_refused(write_checkpoint, make_tensors, sizes):
    tensors = make_tensors(sizes)
    tensors["model.norm.weight"] = torch.ones(32, dtype=torch.int8)
    directory, _, _ = write_checkpoint({}, tensors)
    with pytest.raises(ValueError, match=r"tensor 'model.norm.weight' holds integers; allowed: F64, F32"):
        load_model(directory)


class TestGGUF:
    @pytest.fixture
    def path(self, sizes, make_tensors, write_gguf):
        return write_gguf(sizes, make_tensors(sizes))

    def test_cut(self, path):
        path.write_bytes(path.read_bytes()[:-2000])
        with pytest.raises(ValueError, match=r"model.gguf: tensor '.*' ends at byte .*cut short"):
            load_inference_model(path)

    @pytest.mark.parametrize("size", [0, 3, 10, 30, 200, 900])
    def test_cut_header(self, path, size):
        path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(ValueError, match=r"model.gguf: .* needs \d+ bytes at \d+, but the file has only"):
            load_inference_model(path)

    def test_unknown_architecture(self, path):
        path.write_bytes(path.read_bytes().replace(b"llama", b"mamba"))
        with pytest.raises(ValueError, match=r"'mamba' is not supported; allowed: llama, mistral, qwen2"):
            load_inference_model(path)

    def test_version_and_magic(self, path):
        raw = path.read_bytes()
        path.write_bytes(raw[:4] + struct.pack("<I", 99) + raw[8:])
        with pytest.raises(ValueError, match="GGUF version is 99; allowed: 2, 3"):
            load_inference_model(path)
        path.write_bytes(b"FUGG" + raw[4:])
        with pytest.raises(ValueError, match="it does not begin with GGUF"):
            load_inference_model(path)

    def test_missing_key(self, path):
        path.write_bytes(path.read_bytes().replace(b"llama.block_count", b"llama.block_xount"))
        with pytest.raises(ValueError, match=r"model.gguf: the key 'llama.block_count' is missing"):
            load_inference_model(path)

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(place=st.integers(0, 1500), value=st.binary(min_size=1, max_size=8))
    def test_random_damage_in_the_header(self, path, place, value):
        """Any bytes at all: the file opens or says what is wrong; never another kind of error."""
        raw = path.read_bytes()
        damaged = path.with_name("damaged.gguf")
        damaged.write_bytes(raw[:place] + value + raw[place + len(value) :])
        try:
            open_checkpoint(damaged)
        except ValueError as error:
            assert str(damaged) in str(error)


def test_a_file_that_is_neither(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(b"x")
    with pytest.raises(ValueError, match=r"allowed: a directory with config.json, or a .gguf file"):
        load_model(path)


def test_gguf_without_its_package(sizes, make_tensors, write_gguf, monkeypatch):
    path = write_gguf(sizes, make_tensors(sizes))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"reading it needs the package gguf: pip install 'atb-modules\[gguf\]'"):
        load_model(path)
