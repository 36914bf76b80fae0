"""The small model's files are what their formats say."""

from __future__ import annotations

import json
import pathlib
import struct

import torch

from phases.small_model import write_service_model, write_small_model


def test_every_tensor_lies_where_the_header_says(tmp_path: pathlib.Path) -> None:
    folder = write_small_model(tmp_path / "model", seed=3, latent=256)
    config = json.loads((folder / "config.json").read_text())
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"]) == (256, 64)
    content = (folder / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    assert size % 8 == 0
    header = json.loads(content[8 : 8 + size])
    assert header.pop("__metadata__") == {"format": "pt"}
    end = 0
    for entry in header.values():
        begin, stop = entry["data_offsets"]
        assert begin == end
        end = stop
        assert stop - begin == 4 * torch.Size(entry["shape"]).numel()
    assert 8 + size + end == len(content)
    entry = header["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"]
    assert entry["shape"] == [256 + 64, 128]
    norm = header["model.norm.weight"]["data_offsets"]
    values = torch.frombuffer(
        bytearray(content[8 + size + norm[0] : 8 + size + norm[1]]), dtype=torch.float32
    )
    assert torch.equal(values, torch.ones(128))


def test_a_seed_gives_one_model(tmp_path: pathlib.Path) -> None:
    def written(name: str, seed: int) -> bytes:
        folder = write_small_model(tmp_path / name, seed=seed)
        return (folder / "model.safetensors").read_bytes()

    assert written("a", 1) == written("b", 1) != written("c", 2)


def test_a_gpus_model_is_in_bf16_and_small(tmp_path: pathlib.Path) -> None:
    folder = write_service_model(tmp_path / "model", seed=1, vocabulary=512, layers=1)
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_attention_heads"], config["torch_dtype"]) == (8, "bfloat16")
    yarn = config["rope_scaling"]
    reach = yarn["factor"] * yarn["original_max_position_embeddings"]
    assert reach == config["max_position_embeddings"] == 262144
    assert (folder / "model.safetensors").stat().st_size < 25e6
