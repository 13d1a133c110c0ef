"""What DecoderModel, load_model and save_model are given: labels, masks, positions, devices and paths, each by name."""

from __future__ import annotations

import pytest
import torch

from atb_modules.attention.rope import RotaryConfig
from atb_modules.models.config import ModelConfig
from atb_modules.models.decoder import DecoderModel
from atb_modules.models.loading import load_inference_model, load_model
from atb_modules.models.saving import family_state_dict, save_model

SIZES = {"vocab_size": 53, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
OTHERS = {"family": "llama", "intermediate_size": 24, "windows": (None,), "rotary": (RotaryConfig(),)}
CONFIG = ModelConfig(**SIZES, **OTHERS, max_positions=64)
IDS = torch.randint(0, 53, (3, 7), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return DecoderModel(CONFIG, attention_type="sdpa")


def changed(value, dtype=torch.int64):
    labels = IDS.to(dtype).clone()
    labels[1, 3] = value
    return labels


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"labels": IDS.tolist()}, TypeError, "labels is list; allowed: a tensor"),
        ({"labels": IDS.float()}, TypeError, "labels is torch.float32; allowed: int64, int32"),
        ({"labels": changed(53)}, ValueError, "labels has ids from 53 to 53 outside .* 0 to vocab_size - 1 = 52"),
        ({"labels": changed(-1)}, ValueError, "labels has ids from -1 to -1 .*and -100 for a token"),
        ({"labels": changed(2**31 - 1, torch.int32)}, ValueError, "labels has ids from 2147483647"),
        ({"labels": IDS.to("meta")}, ValueError, "labels is on meta; input_ids is on cpu"),
        ({"attention_mask": torch.ones_like(IDS).tolist()}, TypeError, "attention_mask is list; allowed: a tensor"),
        ({"attention_mask": torch.ones(3, 7)}, TypeError, "attention_mask is torch.float32; allowed: bool or integers"),
        ({"attention_mask": IDS.to("meta")}, ValueError, "attention_mask is on meta"),
        ({"position_ids": torch.tensor(0)}, ValueError, r"position_ids has shape \(\); input_ids has \(3, 7\)"),
        ({"position_ids": torch.zeros(1, dtype=torch.int64)}, ValueError, r"position_ids has shape \(1,\)"),
        ({"position_ids": torch.zeros(3, 1, dtype=torch.int64)}, ValueError, r"position_ids has shape \(3, 1\)"),
        ({"position_ids": torch.zeros(2, 7, dtype=torch.int64)}, ValueError, r"position_ids has shape \(2, 7\)"),
        ({"position_ids": torch.zeros(1, 1, 7, dtype=torch.int64)}, ValueError, "position_ids has shape"),
    ],
)
@pytest.mark.parametrize("cached", [False, True])
def test_tensors_beside_the_ids(model, options, error, message, cached):
    cache = model.new_cache(32, num_pages=9) if cached else None
    with pytest.raises(error, match=message):
        model(IDS, past_key_values=cache, **options)
    assert not cached or cache.batch_size == 0


def test_labels_of_both_dtypes(model):
    loss = model(IDS, labels=changed(-100)).loss
    short = model(IDS.int(), labels=changed(-100, torch.int32)).loss
    assert loss.item() == short.item() > 0
    short.backward()
    assert model.lm_head.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("positions", [torch.arange(7), torch.arange(7)[None], torch.arange(7).expand(3, 7)])
def test_positions_for_all_rows_or_for_each(model, positions):
    torch.testing.assert_close(model(IDS, position_ids=positions).logits, model(IDS).logits)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m, d: DecoderModel(CONFIG, device="zzz"), ValueError, "device is 'zzz'; allowed: a torch.device"),
        (lambda m, d: DecoderModel(CONFIG, device=1.5), TypeError, "device is 1.5"),
        (lambda m, d: m.new_cache(32, evict="x"), TypeError, "evict is 'x'"),
        (lambda m, d: save_model(None, d), TypeError, "model is None .*; allowed: DecoderModel"),
        (lambda m, d: save_model(m, None), TypeError, "directory is None .*; allowed: a str or pathlib.Path"),
        (lambda m, d: family_state_dict({}), TypeError, "model is {}"),
        (lambda m, d: load_model(None), TypeError, "path is None .*; allowed: a str or pathlib.Path"),
        (lambda m, d: load_model(3), TypeError, r"path is 3 \(int\)"),
        (lambda m, d: load_inference_model(None), TypeError, "path is None"),
    ],
)
def test_arguments_are_named(model, tmp_path, call, error, message):
    with pytest.raises(error, match=message):
        call(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
