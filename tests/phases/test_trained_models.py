"""Trained models, by trainings of seconds: what they learn, how they are kept, their layout."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import random
import struct

import pytest
import torch

from phases.draft_acceptance import accepted
from phases.grammar import END, MASK, VOCABULARY, Grammar
from phases.tiny_networks import Drafter, DrafterConfig, Target, TargetConfig
from phases.trained_models import (
    Continuations,
    TrainedModels,
    Training,
    continuations,
    load_models,
    prompts,
    trained_models,
    widened,
)

SEED = 3
SHORT = Training(
    target_steps=12, drafter_steps=12, length=48, batch=4, continued=8, anchors=4, block=4
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> TrainedModels:
    return trained_models(tmp_path_factory.mktemp("models"), seed=SEED, training=SHORT)


def header(file: pathlib.Path) -> dict[str, list[int]]:
    """The shape of each tensor."""
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    found = json.loads(content[8 : 8 + size])
    return {name: about["shape"] for name, about in found.items() if name != "__metadata__"}


def test_losses_fall(models: TrainedModels) -> None:
    for kind in ("target", "drafter"):
        assert models.losses[f"{kind}, last"] < models.losses[f"{kind}, first"] - 0.3, SEED


def test_models_are_trained_once(models: TrainedModels) -> None:
    steps: list[tuple[int, int, str]] = []
    again = trained_models(
        models.target.parents[1],
        seed=SEED,
        training=SHORT,
        progress=lambda *step: steps.append(step),
    )
    assert again == models
    assert not steps


def test_a_seed_gives_the_same_bytes_and_another_one_others(
    models: TrainedModels, tmp_path: pathlib.Path
) -> None:
    torch.manual_seed(99)
    again = trained_models(tmp_path, seed=SEED, training=SHORT)
    other = trained_models(tmp_path, seed=SEED + 1, training=SHORT)
    for name in ("target", "drafter"):
        first, second, third = (
            (getattr(made, name) / "model.safetensors").read_bytes()
            for made in (models, again, other)
        )
        assert first == second != third


def test_a_training_that_is_ended_leaves_nothing_that_looks_whole(tmp_path: pathlib.Path) -> None:
    def end_at(done: int, total: int, note: str) -> None:
        if done == SHORT.target_steps + 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained_models(tmp_path, seed=SEED, training=SHORT, progress=end_at)
    assert list(tmp_path.iterdir()) == []


def test_the_drafters_layout_is_that_of_sglangs_draft_model(models: TrainedModels) -> None:
    config = json.loads((models.drafter / "config.json").read_text())
    target = json.loads((models.target / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"] == {"mask_token_id": MASK, "target_layer_ids": [0, 1]}
    assert (config["block_size"], config["num_target_layers"]) == (4, 3)
    for key in ("hidden_size", "vocab_size"):
        assert config[key] == target[key]
    wide, head = config["num_attention_heads"] * 64, config["num_key_value_heads"] * 64
    shapes = header(models.drafter / "model.safetensors")
    expected = {"fc.weight": [128, 256], "hidden_norm.weight": [128], "norm.weight": [128]}
    for layer in ("layers.0", "layers.1"):
        expected |= {
            f"{layer}.input_layernorm.weight": [128],
            f"{layer}.post_attention_layernorm.weight": [128],
            f"{layer}.self_attn.q_proj.weight": [wide, 128],
            f"{layer}.self_attn.k_proj.weight": [head, 128],
            f"{layer}.self_attn.v_proj.weight": [head, 128],
            f"{layer}.self_attn.o_proj.weight": [128, wide],
            f"{layer}.self_attn.q_norm.weight": [64],
            f"{layer}.self_attn.k_norm.weight": [64],
            f"{layer}.mlp.gate_proj.weight": [256, 128],
            f"{layer}.mlp.up_proj.weight": [256, 128],
            f"{layer}.mlp.down_proj.weight": [128, 256],
        }
    assert shapes == expected


def test_the_targets_row_is_the_kernels(models: TrainedModels) -> None:
    shapes = header(models.target / "model.safetensors")
    assert shapes["model.layers.2.self_attn.kv_a_proj_with_mqa.weight"] == [512 + 64, 128]
    assert (models.target / "model.safetensors").stat().st_size < 5e6


def test_a_wider_latent_row_computes_the_same() -> None:
    torch.manual_seed(SEED)
    narrow = Target(TargetConfig(VOCABULARY, latent=64, layers=2))
    with torch.no_grad():
        for layer in narrow.model.layers:
            layer.self_attn.kv_a_layernorm.weight.uniform_(0.5, 2.0)
        tokens = prompts(SEED, 2, 30)
        wide = widened(narrow, 512, seed=SEED)
        torch.testing.assert_close(wide(tokens)[0], narrow(tokens)[0], atol=1e-4, rtol=1e-4)


def test_a_cache_changes_nothing(models: TrainedModels) -> None:
    """Continued token by token, and in one pass."""
    target, drafter = load_models(models)
    said = continuations(target, drafter, prompts(SEED, 3, 11), 40)
    with torch.no_grad():
        likeliest = target(said.tokens)[0].argmax(-1)
    assert torch.equal(said.tokens[:, 11:], likeliest[:, 10:-1])


def test_a_block_sees_what_is_before_it_and_itself() -> None:
    torch.manual_seed(SEED)
    config = DrafterConfig(VOCABULARY, target_layers=3, mask=MASK, features=(0, 1), block=4)
    drafter = Drafter(config)
    context, blocks = torch.randn(1, 20, 256), torch.randn(1, 2, 4, 128)
    anchors = torch.tensor([[7, 12]])
    with torch.no_grad():
        before = drafter(context, anchors, blocks)
        changed = context.clone()
        changed[:, 7:] += 1
        after = drafter(changed, anchors, blocks)
        assert torch.equal(before[:, 0], after[:, 0])
        assert not torch.allclose(before[:, 1], after[:, 1])
        alone = drafter(context, anchors[:, 1:], blocks[:, 1:])
        torch.testing.assert_close(before[:, 1:], alone)
        other = blocks.clone()
        other[:, 1, 3] += 1  # the last of a block changes its first: it is not causal
        assert not torch.allclose(before[:, 1, 0], drafter(context, anchors, other)[:, 1, 0])


@pytest.mark.parametrize("features", [(), (1, 0), (0, 2), (0, 0)])
def test_features_that_sglang_cannot_capture_are_refused(features: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="features"):
        DrafterConfig(VOCABULARY, target_layers=3, mask=MASK, features=features)


def test_documents_hold_only_the_languages_tokens() -> None:
    document = Grammar(SEED).document(random.Random(SEED), 2000)
    assert len(document) == 2000
    assert max(document) < VOCABULARY
    assert not {END, MASK} & set(document)
    assert document != Grammar(SEED + 1).document(random.Random(SEED), 2000)


def test_acceptance_counts_what_the_target_said(models: TrainedModels) -> None:
    """A drafter whose head always says one token gets that token right, and no other."""
    target, drafter = load_models(models)
    with torch.no_grad():
        target.lm_head.weight.zero_()  # every token is as likely, and the lowest is taken
    tokens = torch.zeros(2, 30, dtype=torch.int64)
    said = Continuations(tokens, torch.randn(2, 30, 256))
    found = accepted(target, drafter, said, 5, (3, 8))
    assert found.right == (1.0, 1.0, 1.0)
    assert found.chain > 3.5
    said = dataclasses.replace(said, tokens=torch.ones_like(tokens))
    found = accepted(target, drafter, said, 5, (3, 8))
    assert (found.chain, found.right) == (1.0, (0.0, 0.0, 0.0))
