"""Models' sizes: Kimi K2's against its model card, and config.json files."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from kdtree_engine.capacity.dense import end_weights, weights_of_products
from kdtree_engine.capacity.shapes import KIMI_K2, read_shape
from kdtree_engine.errors import ConfigError

KIMI = {
    "model_type": "kimi_k2",
    "num_hidden_layers": 61,
    "first_k_dense_replace": 1,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 163840,
    "max_position_embeddings": 262144,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "moe_layer_freq": 1,
    "tie_word_embeddings": False,
}
DENSE = {
    **{name: value for name, value in KIMI.items() if "expert" not in name},
    "model_type": "deepseek_v2",
    "q_lora_rank": None,
    "num_hidden_layers": 4,
}


def folder(where: pathlib.Path, text: str) -> pathlib.Path:
    (where / "config.json").write_text(text)
    return where


def test_kimi_k2_has_a_trillion_weights_and_activates_32_billion() -> None:
    experts = KIMI_K2.moe_layers * KIMI_K2.expert_weights
    dense = weights_of_products(KIMI_K2, 1) + end_weights(KIMI_K2, 1)
    assert experts * KIMI_K2.experts + dense == pytest.approx(1.03e12, rel=0.01)
    embedding = KIMI_K2.hidden * KIMI_K2.vocabulary
    assert experts * KIMI_K2.top_k + dense - embedding == pytest.approx(32e9, rel=0.02)


def test_a_token_of_kv_is_1152_bytes_a_layer() -> None:
    assert KIMI_K2.kv_bytes == 61 * 1152 == 70_272


def test_the_built_in_model_is_that_of_its_config(tmp_path: pathlib.Path) -> None:
    found = read_shape(folder(tmp_path, json.dumps(KIMI)))
    assert found.name == tmp_path.name
    assert {**vars(found), "name": KIMI_K2.name} == vars(KIMI_K2)


def test_a_model_that_sees_pictures_has_its_text_model_within(tmp_path: pathlib.Path) -> None:
    outer = {"model_type": "kimi_k25", "text_config": KIMI}
    assert read_shape(folder(tmp_path, json.dumps(outer))).experts == 384


def test_a_model_without_experts_needs_say_nothing_of_them(tmp_path: pathlib.Path) -> None:
    found = read_shape(folder(tmp_path, json.dumps(DENSE)))
    assert (found.layers, found.moe_layers, found.experts, found.query_rank) == (4, 0, 0, 0)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model_type": "llama"}, "field model_type: expected one of deepseek_v2"),
        ({"kv_lora_rank": 256}, "field kv_lora_rank: the kernel takes 512 alone, got 256"),
        ({"qk_rope_head_dim": 32}, "field qk_rope_head_dim"),
        ({"hidden_size": 0}, r"field hidden_size: expected a whole number, 1\.\."),
        ({"hidden_size": True}, "field hidden_size"),
        ({"hidden_size": 7168.5}, "field hidden_size"),
        ({"hidden_size": 10**30}, "field hidden_size"),
        ({"n_routed_experts": 10**6}, "field n_routed_experts"),
        ({"vocab_size": None}, "field vocab_size"),
        ({"num_experts_per_tok": 385}, "field num_experts_per_tok: 385 of 384 experts"),
        ({"moe_layer_freq": 2}, "field moe_layer_freq"),
    ],
)
def test_another_kind_of_model_is_refused_in_one_line(
    tmp_path: pathlib.Path, changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        read_shape(folder(tmp_path, json.dumps({**KIMI, **changed})))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"), [("{", "is not JSON"), ("[]", "is not an object"), ("[" * 10**5, "JSON")]
)
def test_what_is_no_config_is_refused(tmp_path: pathlib.Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_shape(folder(tmp_path, text))


def test_a_folder_without_a_config_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_shape(tmp_path)
