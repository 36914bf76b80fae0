"""The trained models mean in SGLang what they mean in plain torch.

KD_TRAINED_MODELS names a folder that keeps them; without it they are trained here, in minutes.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import urllib.request

import pytest
import torch

from phases.draft_acceptance import accepted
from phases.p3_backend_wiring.checks import _cpu_server
from phases.service import Service, server_python, serving
from phases.tiny_networks import Drafter, Target
from phases.trained_models import (
    PROMPT,
    TrainedModels,
    continuations,
    load_models,
    prompts,
    trained_models,
)

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

SEED = 1


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> TrainedModels:
    kept = os.environ.get("KD_TRAINED_MODELS")
    folder = pathlib.Path(kept) if kept else tmp_path_factory.mktemp("models")
    return trained_models(folder, seed=SEED)


@pytest.fixture(scope="module")
def networks(models: TrainedModels) -> tuple[Target, Drafter]:
    return load_models(models)


def hidden_states(service: Service, prompt: tuple[int, ...]) -> torch.Tensor:
    """What SGLang captured at each token of the prompt, [tokens, layers * hidden]."""
    body = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True},
        "return_hidden_states": True,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{service.port}/generate",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
        found = json.loads(answer.read())
    return torch.tensor(found["meta_info"]["hidden_states"][0])


def test_the_server_says_the_targets_tokens_and_captures_its_hidden_states(
    models: TrainedModels, networks: tuple[Target, Drafter], tmp_path: pathlib.Path
) -> None:
    """Greedy tokens are equal; so are, to rounding, the features that a drafter reads."""
    target, drafter = networks
    layers = map(str, drafter.config.features)
    arguments = (
        *("--attention-backend", "triton", "--triton-attention-num-kv-splits", "1"),
        "--disable-radix-cache",  # a cached prompt has no hidden states
        # With this flag the algorithm names the way of capturing alone; nothing drafts.
        *("--enable-return-aux-hidden-states", "--speculative-algorithm", "DFLASH"),
        *("--return-aux-hidden-state-layer-ids", *layers),
    )
    new, lengths = 64, (6, 17, 24, 40, 90)
    asked = [prompts(SEED, 1, length, series=10 + length)[0] for length in lengths]
    log = tmp_path / "server.log"
    with _cpu_server(models.target, arguments, log, {}, serving) as service:
        found = service.generate([tuple(one.tolist()) for one in asked], new)
        captured = [hidden_states(service, tuple(one.tolist())) for one in asked]
    for prompt, answer, features in zip(asked, found, captured, strict=True):
        said = continuations(target, drafter, prompt[None], len(prompt) + new)
        assert list(answer) == said.tokens[0, len(prompt) :].tolist(), f"seed {SEED}"
        torch.testing.assert_close(features, said.features[0, : len(prompt)], atol=2e-4, rtol=2e-4)


def test_sglangs_own_dflash_accepts_chains_of_the_drafter(
    root: pathlib.Path,
    models: TrainedModels,
    networks: tuple[Target, Drafter],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The real worker, its draft KV pool and its Triton attention; the tokens stay the target's."""
    support = root / "tests" / "support" / "sglang_dflash"
    paths = (str(support), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    arguments = (
        *("--attention-backend", "triton", "--triton-attention-num-kv-splits", "1"),
        *("--speculative-algorithm", "DFLASH", "--speculative-draft-attention-backend", "triton"),
        *("--speculative-draft-model-path", str(models.drafter), "--max-running-requests", "16"),
    )
    new = 40
    asked = [prompts(SEED, 1, length, series=10 + length)[0] for length in (17, 24)]
    log = tmp_path / "server.log"
    with _cpu_server(models.target, arguments, log, {}, serving) as service:
        found = service.answers([tuple(one.tolist()) for one in asked], new)
    for prompt, answer in zip(asked, found, strict=True):
        said = continuations(*networks, prompt[None], len(prompt) + new)
        assert list(answer.tokens) == said.tokens[0, len(prompt) :].tolist(), f"seed {SEED}"
        # The first token comes from the prompt's own pass.
        length = (new - 1) / answer.verified
        print(f"\nseed {SEED}: {length:.2f} tokens a verification")
        assert length >= 3


@pytest.mark.parametrize("anchor", [1, 40, 120])
def test_sglangs_draft_model_computes_what_was_trained(
    root: pathlib.Path,
    models: TrainedModels,
    networks: tuple[Target, Drafter],
    tmp_path: pathlib.Path,
    anchor: int,
) -> None:
    """SGLang's own class with its own loader; only the attention over the KV pool is stood in."""
    target, drafter = networks
    said = continuations(target, drafter, prompts(SEED, 1), 160)
    block = torch.full((drafter.config.block,), drafter.config.mask)
    block[0] = said.tokens[0, anchor]
    embeddings = target.model.embed_tokens(block).detach()
    asked, answered = tmp_path / "asked.pt", tmp_path / "answered.pt"
    torch.save(
        {
            "folder": str(models.drafter),
            "features": said.features[0, :anchor].clone(),
            "embeddings": embeddings,
        },
        asked,
    )
    support = root / "tests" / "support"
    program = str(support / "sglang_drafter.py")
    paths = (support / "sglang_cpu", root / "kdtree-engine")
    done = subprocess.run(
        [server_python(), "-W", "ignore", program, str(asked), str(answered)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "TRITON_INTERPRET": "1",
            "TORCHDYNAMO_DISABLE": "1",
        },
    )
    assert done.returncode == 0, done.stderr[-2000:]
    with torch.no_grad():
        ours = drafter(said.features, torch.tensor([[anchor]]), embeddings[None, None])[0, 0]
    torch.testing.assert_close(torch.load(answered), ours, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "drawn"])
def test_drafts_are_accepted_and_trees_further_than_chains(
    networks: tuple[Target, Drafter], drawn: bool
) -> None:
    target, drafter = networks
    generator = torch.Generator().manual_seed(SEED) if drawn else None
    said = continuations(target, drafter, prompts(SEED, 8), 160, generator=generator)
    found = accepted(target, drafter, said, PROMPT, (8, 16, 32))
    print(f"\nseed {SEED}, drawn {drawn}: {found}")
    assert found.chain >= (2.0 if drawn else 3.0)
    assert found.chain < found.trees[16] < found.trees[32]
    assert found.trees[32] > found.chain + 1


def test_greedy_continuations_do_not_fall_into_short_loops(
    networks: tuple[Target, Drafter],
) -> None:
    """A loop is predicted by any drafter and hides a wrong mask."""
    said = continuations(*networks, prompts(SEED, 8), 320)
    for row in said.tokens.tolist():
        for period in range(1, 97):
            assert row[-96:] != row[-96 - period : -period], f"seed {SEED}, period {period}"
    assert len({tuple(row[PROMPT:]) for row in said.tokens.tolist()}) == len(said.tokens)


def test_a_token_far_back_decides(networks: tuple[Target, Drafter]) -> None:
    """Another name of a role in a document's first line changes what is said of it later on."""
    target, drafter = networks
    start = prompts(SEED, 1)[0]
    changed = 0
    for role in range(1, 5):
        other = start.clone()
        # Names of one role are eight neighbouring tokens.
        first = 16 + 8 * (role - 1)
        other[role] = first + (other[role] - first + 3) % 8
        said = [
            continuations(target, drafter, one[None], 100).tokens[0, PROMPT:]
            for one in (start, other)
        ]
        changed += not torch.equal(*said)
    assert changed >= 3, f"seed {SEED}: {changed} of 4"
