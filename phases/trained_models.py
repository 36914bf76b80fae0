"""A tiny MLA target and a DFlash drafter for it, trained here, as folders that SGLang loads.

Random weights accept next to nothing, so they cannot show what a draft tree gains. These two are
trained in minutes on a CPU: the target on the synthetic language of `phases.grammar`, the drafter
on what the target itself goes on to say, both its likeliest tokens and ones drawn at temperature
1, with the target's hidden states as DFlash has it (arXiv 2602.06036).

The target is trained with a latent row of 64 values, which costs a fraction of 512, and then turned
into one of 512 that computes the same (`widened`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import pathlib
import random
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from phases import grammar, small_model, tiny_networks
from phases.grammar import MASK, VOCABULARY, Grammar
from phases.tiny_networks import Cache, Drafter, DrafterConfig, Target, TargetConfig

__all__ = [
    "Continuations",
    "TrainedModels",
    "Training",
    "continuations",
    "draft_logits",
    "load_models",
    "prompts",
    "trained_models",
    "widened",
]

PROMPT = 24
"""Tokens of a document that the target continues for the drafter to learn from."""

_SOURCES = (__file__, grammar.__file__, tiny_networks.__file__, small_model.__file__)
_NARROW_LATENT = 64
_REPORT = "report.json"


@dataclasses.dataclass(frozen=True)
class Training:
    """How long and on what. The defaults take some minutes on two CPU cores.

    block: tokens of a draft block. target_steps, drafter_steps: steps of AdamW. length: tokens of
    a document. batch: documents a step. continued: documents that the target continues, half of
    them greedily. anchors: draft blocks of each of them in one step.
    """

    block: int = 8
    target_steps: int = 1200
    drafter_steps: int = 250
    length: int = 160
    batch: int = 12
    continued: int = 256
    anchors: int = 10
    target_rate: float = 5e-3
    drafter_rate: float = 4e-3


@dataclasses.dataclass(frozen=True)
class TrainedModels:
    """Folders with `config.json` and `model.safetensors` each.

    losses: cross entropy in nats per token, of the first and the last steps of both trainings.
    """

    target: pathlib.Path
    drafter: pathlib.Path
    losses: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Continuations:
    """Documents that the target went on with by itself.

    tokens: int64 [B, S], of which the first `PROMPT` are the language's. features: float32
    [B, S, features * hidden], what the drafter reads of the target at each token.
    """

    tokens: torch.Tensor
    features: torch.Tensor


def trained_models(
    folder: pathlib.Path,
    *,
    seed: int,
    training: Training | None = None,
    device: torch.device | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, note: None,
) -> TrainedModels:
    """The two models of this seed, trained now unless `folder` has them already.

    They lie in a folder named after the content of this module and those that it trains with, the
    seed and `training`. It appears as a whole, when all is done. On a CPU one seed gives the same
    bytes again, with the same torch on the same kind of CPU.

    device: where to train; None: on the CPU. progress: `progress(done, total, note)`, at each step.
    """
    training = training or Training()
    place = folder / _content(seed, training)
    if not place.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".unfinished-") as made:
            unfinished = pathlib.Path(made) / "models"
            with _one_thread():
                _train(unfinished, seed, training, device or torch.device("cpu"), progress)
            # Another process may have been faster: a folder that holds something stays.
            with contextlib.suppress(OSError):
                unfinished.rename(place)
    return TrainedModels(
        target=place / "target",
        drafter=place / "drafter",
        losses=json.loads((place / _REPORT).read_text()),
    )


def load_models(
    models: TrainedModels, device: torch.device | None = None
) -> tuple[Target, Drafter]:
    """Both models again in plain torch, from their files."""

    def config(folder: pathlib.Path) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((folder / "config.json").read_text())
        return found

    about, draft = config(models.target), config(models.drafter)
    target = Target(
        TargetConfig(
            vocabulary=about["vocab_size"],
            hidden=about["hidden_size"],
            layers=about["num_hidden_layers"],
            heads=about["num_attention_heads"],
            latent=about["kv_lora_rank"],
            rope=about["qk_rope_head_dim"],
            nope=about["qk_nope_head_dim"],
            value=about["v_head_dim"],
            mlp=about["intermediate_size"],
            positions=about["max_position_embeddings"],
        )
    )
    drafter = Drafter(
        DrafterConfig(
            vocabulary=draft["vocab_size"],
            target_layers=draft["num_target_layers"],
            mask=draft["dflash_config"]["mask_token_id"],
            features=tuple(draft["dflash_config"]["target_layer_ids"]),
            block=draft["block_size"],
            hidden=draft["hidden_size"],
            layers=draft["num_hidden_layers"],
            heads=draft["num_attention_heads"],
            kv_heads=draft["num_key_value_heads"],
            head=draft["head_dim"],
            mlp=draft["intermediate_size"],
            positions=draft["max_position_embeddings"],
        )
    )
    target.load_state_dict(_read(models.target / "model.safetensors"))
    drafter.load_state_dict(_read(models.drafter / "model.safetensors"))
    return target.to(device).eval(), drafter.to(device).eval()


def prompts(seed: int, count: int, length: int = PROMPT, *, series: int = 1) -> torch.Tensor:
    """The beginnings of `count` documents of this seed's language, int64 [count, length].

    series: another one has other documents. Of series 0 the drafter's training makes use.
    """
    draw = random.Random(f"prompts, series {series} of {seed}")
    language = Grammar(seed)
    return torch.tensor([language.document(draw, length) for _ in range(count)])


@torch.no_grad()
def continuations(
    target: Target,
    drafter: Drafter,
    starts: torch.Tensor,
    length: int,
    *,
    generator: torch.Generator | None = None,
) -> Continuations:
    """Each of `starts`, int64 [B, P], continued by the target to `length` tokens.

    generator: draws the tokens at temperature 1; None: the likeliest token each time.
    """
    device = target.lm_head.weight.device
    tokens = starts.to(device)
    cache = Cache(target.config, len(starts), length, device)
    new = tokens
    while tokens.shape[1] < length:
        logits = target(new, cache)[0][:, -1]
        if generator is None:
            new = logits.argmax(-1, keepdim=True)
        else:
            new = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator).to(device)
        tokens = torch.cat([tokens, new], dim=1)
    features = [drafter.features_of(target(part)[1]) for part in torch.split(tokens, 32)]
    return Continuations(tokens, torch.cat(features))


def widened(target: Target, latent: int, *, seed: int) -> Target:
    """A target with a latent row of `latent` values that computes the same as `target`.

    The row's values are turned into a random subspace of the wider row, so that each value of that
    matters, and scaled so that their mean square, by which the row is normalised, stays.
    """
    config = dataclasses.replace(target.config, latent=latent)
    generator = torch.Generator().manual_seed(seed)
    wide = Target(config)
    state = target.state_dict()
    narrow = target.config.latent
    scale = math.sqrt(latent / narrow)
    for layer in range(config.layers):
        place = f"model.layers.{layer}.self_attn"
        drawn = torch.randn(latent, narrow, generator=generator, dtype=torch.float64)
        turn = torch.linalg.qr(drawn).Q.float().to(target.lm_head.weight.device)
        down, rope = state[f"{place}.kv_a_proj_with_mqa.weight"].split([narrow, config.rope])
        gain = state[f"{place}.kv_a_layernorm.weight"]
        state |= {
            f"{place}.kv_a_proj_with_mqa.weight": torch.cat([scale * turn @ down, rope]),
            f"{place}.kv_a_layernorm.weight": gain.new_ones(latent),
            f"{place}.kv_b_proj.weight": state[f"{place}.kv_b_proj.weight"] * gain @ turn.T / scale,
        }
    wide.load_state_dict(state)
    return wide.to(target.lm_head.weight.device)


def _content(seed: int, training: Training) -> str:
    digest = hashlib.sha256(json.dumps([seed, dataclasses.asdict(training)]).encode())
    for source in _SOURCES:
        digest.update(pathlib.Path(source).read_bytes())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """The operations are small: more threads wait for each other, and sum in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _train(
    folder: pathlib.Path,
    seed: int,
    training: Training,
    device: torch.device,
    progress: Callable[[int, int, str], None],
) -> None:
    total = training.target_steps + training.drafter_steps
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        narrow = Target(TargetConfig(VOCABULARY, latent=_NARROW_LATENT)).to(device)
        layers = narrow.config.layers
        drafter = Drafter(
            DrafterConfig(
                VOCABULARY,
                target_layers=layers,
                mask=MASK,
                features=tuple(range(layers - 1)),
                block=training.block,
            )
        ).to(device)
    losses: dict[str, float] = {}

    def note(kind: str, done: int, loss: float, before: int) -> None:
        losses.setdefault(f"{kind}, first", loss)
        # Smoothed, as one step's batch is small.
        last = losses.get(f"{kind}, last", loss)
        losses[f"{kind}, last"] = last + (loss - last) / min(done, 50)
        progress(before + done, total, f"{kind}: loss {losses[f'{kind}, last']:.3f}")

    for done, loss in enumerate(_train_target(narrow, seed, training), 1):
        note("target", done, loss, 0)
    target = widened(narrow, TargetConfig.latent, seed=seed).requires_grad_(False)
    for done, loss in enumerate(_train_drafter(drafter, target, seed, training), 1):
        note("drafter", done, loss, training.target_steps)

    for name, model in (("target", target), ("drafter", drafter)):
        (folder / name).mkdir(parents=True)
        tensors = {key: value.detach().cpu() for key, value in model.state_dict().items()}
        small_model._save(folder / name / "model.safetensors", tensors)
        about = json.dumps(model.config.hugging_face(), indent=1)
        (folder / name / "config.json").write_text(about)
    (folder / _REPORT).write_text(json.dumps(losses))


def _train_target(target: Target, seed: int, training: Training) -> Iterator[float]:
    """Next-token cross entropy over whole documents; yields the loss of each step."""
    language, draw = Grammar(seed), random.Random(seed)
    step = _optimizer(target, training.target_rate, training.target_steps)
    device = target.lm_head.weight.device
    for _ in range(training.target_steps):
        documents = [language.document(draw, training.length) for _ in range(training.batch)]
        tokens = torch.tensor(documents, device=device)
        logits, _outputs = target(tokens[:, :-1])
        yield step(functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))


def _train_drafter(
    drafter: Drafter, target: Target, seed: int, training: Training
) -> Iterator[float]:
    """Cross entropy of the tokens of random blocks in the target's continuations.

    Near tokens weigh more, as a wrong one makes those behind it worthless: exp(-(i - 1) / 4).
    """
    block, device = training.block, target.lm_head.weight.device
    generator = torch.Generator().manual_seed(seed)
    starts = prompts(seed, training.continued, min(PROMPT, training.length // 2), series=0)
    drawn, greedy = starts.tensor_split(2)
    parts = [
        continuations(target, drafter, drawn, training.length, generator=generator),
        continuations(target, drafter, greedy, training.length),
    ]
    tokens = torch.cat([part.tokens for part in parts])
    features = torch.cat([part.features for part in parts])

    weights = torch.exp(-torch.arange(block - 1, device=device) / 4)
    step = _optimizer(drafter, training.drafter_rate, training.drafter_steps)
    for _ in range(training.drafter_steps):
        rows = torch.randint(len(tokens), (training.batch,), generator=generator)
        # Where the last known token stands: with something before it, and a block behind it.
        shape = (training.batch, training.anchors)
        anchors = torch.randint(1, training.length - block + 1, shape, generator=generator)
        rows, anchors = rows.to(device), anchors.to(device)
        places = anchors[:, :, None] + torch.arange(block, device=device)
        known = tokens[rows].gather(1, places.flatten(1)).view_as(places)
        logits = draft_logits(target, drafter, features[rows], anchors, known[:, :, 0])
        loss = functional.cross_entropy(
            logits.flatten(0, 2), known[:, :, 1:].flatten(), reduction="none"
        ).view(-1, block - 1)
        yield step((loss * weights).mean() / weights.mean())


def draft_logits(
    target: Target,
    drafter: Drafter,
    features: torch.Tensor,
    anchors: torch.Tensor,
    last: torch.Tensor,
) -> torch.Tensor:
    """Logits float32 [B, A, block - 1, vocabulary] of the tokens behind each anchor.

    features: as of `Continuations`. anchors: int64 [B, A], places of the last known tokens, which
    are `last`, int64 [B, A].
    """
    config = drafter.config
    tokens = last[:, :, None].repeat(1, 1, config.block)
    tokens[:, :, 1:] = config.mask
    hidden = drafter(features, anchors, target.model.embed_tokens(tokens))
    out: torch.Tensor = target.lm_head(hidden[:, :, 1:])
    return out


def _optimizer(model: nn.Module, rate: float, steps: int) -> Callable[[torch.Tensor], float]:
    """A function that takes one step of AdamW down a loss and returns the loss.

    The rate rises in the first steps and falls to a twentieth along half a cosine.
    """
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.01)

    def factor(done: int) -> float:
        warm = min(1.0, (done + 1) / min(30, steps))
        return warm * (0.05 + 0.95 * (1 + math.cos(math.pi * done / steps)) / 2)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def step(loss: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        return loss.item()

    return step


def _read(path: pathlib.Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file in float32."""
    content = bytearray(path.read_bytes())
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__", None)
    found = {}
    for name, about in header.items():
        begin, end = about["data_offsets"]
        part = content[8 + size + begin : 8 + size + end]
        found[name] = torch.frombuffer(part, dtype=torch.float32).view(about["shape"]).clone()
    return found
