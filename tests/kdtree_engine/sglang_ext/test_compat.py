"""The differences between SGLang's releases, tried on modules that stand in for them."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from typing import Any

import pytest
from stand_in_modules import without_sglang

from kdtree_engine.errors import MissingError
from kdtree_engine.sglang_ext import compat, plugin

REGISTRY = "sglang.srt.layers.attention.attention_registry"
HOMES = {"0.5.17": "sglang.srt.server_args", "0.5.23": "sglang.srt.arg_groups.choices"}


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`modules("a.b", name=...)` puts a module there; SGLang itself is hidden."""
    return without_sglang(monkeypatch)


def registering(modules: Any, release: str) -> tuple[list[str], dict[str, Any]]:
    """An SGLang that keeps backend names where `release` does; returns what gets registered."""
    choices: list[str] = []
    backends: dict[str, Any] = {}
    modules(HOMES[release], add_attention_backend_choices=choices.extend)
    modules(
        REGISTRY,
        register_attention_backend=lambda name: lambda made: backends.setdefault(name, made),
    )
    return choices, backends


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("version", [*HOMES, "0.6.0"])
def test_the_name_is_registered(modules: Any, home: str, version: str) -> None:
    """An unknown release gets the name too, so that the factory can refuse it in one line."""
    choices, backends = registering(modules, home)
    if version in HOMES and version != home:
        with pytest.raises(MissingError, match=f"this SGLang {version} lacks {HOMES[version]}:add"):
            compat.register_backend("kdtree_mla", version, plugin.create)
        return
    compat.register_backend("kdtree_mla", version, plugin.create)
    assert choices == ["kdtree_mla"]
    assert backends == {"kdtree_mla": plugin.create}


@pytest.mark.parametrize("release", HOMES)
def test_a_draft_model_drafts_on_sglangs_triton_backends(
    modules: Any, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a hook before SGLang looks its own backends up, which leaves other servers as they are."""
    hooks: list[tuple[str, Any, str]] = []
    registering(modules, release)
    modules(
        "sglang.srt.plugins.hook_registry",
        HookRegistry=types.SimpleNamespace(register=lambda *given: hooks.append(given)),
        HookType=types.SimpleNamespace(BEFORE="before"),
    )
    monkeypatch.setattr(compat, "sglang_version", lambda: release)
    plugin.register()
    ((target, hook, kind),) = hooks
    assert target == "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
    assert kind == "before"
    backends = {"fa3": "of fa3", "triton": "of triton"}
    for more in ((), ("0.5.23 names the split",)):
        given = ("factory", "decode_attention_backend", backends, "an error text", *more)
        assert hook(*given) is None  # SGLang goes on with what it has given
    assert backends == {"fa3": "of fa3", "triton": "of triton", "kdtree_mla": "of triton"}


def test_without_hooks_the_name_is_registered_and_the_backend_refuses(modules: Any) -> None:
    registering(modules, "0.5.23")
    compat.draft_on_triton("kdtree_mla")
    missing = compat.missing_names("0.5.23")
    assert "sglang.srt.plugins.hook_registry:HookRegistry.register" in missing
    wanted = "sglang.srt.speculative.draft_utils:DraftBackendFactory._create_backend"
    assert wanted in missing


def test_a_plugin_that_finds_no_place_says_so_and_raises_nothing(
    modules: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compat, "sglang_version", lambda: "0.5.23")
    plugin.register()
    (record,) = caplog.records
    assert "kdtree_mla: this SGLang 0.5.23 lacks sglang.srt.arg_groups.choices" in record.message
    assert "\n" not in record.message


def test_a_release_that_nobody_has_read_is_refused() -> None:
    for version in compat.SUPPORTED:
        compat.require_supported(version)
    with pytest.raises(MissingError, match=r"SGLang 0\.5\.18 is installed, expected 0\.5\.17 or"):
        compat.require_supported("0.5.18")


def test_every_missing_name_is_listed(modules: Any) -> None:
    fields = dict.fromkeys(set(compat.METADATA_FIELDS) - {"mask_indptr"})
    backend = types.SimpleNamespace(forward_extend=1, forward_decode=1, init_forward_metadata=1)
    modules(
        "sglang.srt.layers.attention.triton_backend",
        TritonAttnBackend=backend,
        ForwardMetadata=types.SimpleNamespace(__dataclass_fields__=fields),
    )
    missing = compat.missing_names("0.5.23")
    triton = "sglang.srt.layers.attention.triton_backend"
    assert f"{triton}:TritonAttnBackend.init_cuda_graph_state" in missing
    assert f"{triton}:ForwardMetadata.mask_indptr" in missing
    assert f"{triton}:TritonAttnBackend.forward_extend" not in missing
    assert "sglang.srt.mem_cache.memory_pool:KVWriteLoc.for_batch" in missing
    with pytest.raises(MissingError, match=r"this SGLang 0\.5\.23 lacks .*init_cuda_graph_state"):
        compat.require_names("0.5.23")


def test_where_a_row_is_written(modules: Any) -> None:
    class Location:
        def __init__(self, *positional: Any, **named: Any) -> None:
            self.given = (positional, named)

        @classmethod
        def for_batch(cls, *positional: Any, **named: Any) -> Location:
            return cls("for_batch", *positional, **named)

    modules("sglang.srt.mem_cache.memory_pool", KVWriteLoc=Location)
    batch = types.SimpleNamespace(out_cache_loc="slots")
    metadata = types.SimpleNamespace(swa_out_cache_loc="swa", out_cache_loc_full_physical="full")
    old = compat.write_location("0.5.17", batch, metadata)
    assert old.given == (("slots", "swa"), {"full_loc": "full"})
    new = compat.write_location("0.5.23", batch, metadata)
    assert new.given == (("for_batch", batch), {"swa_loc": "swa"})


def test_a_pool_that_renames_its_slots_is_seen(modules: Any) -> None:
    kinds = types.SimpleNamespace(FULL="full")
    modules("sglang.srt.mem_cache.kv_loc_plan", IdSpaceKind=kinds)

    def backend(write: Any, read: Any) -> Any:
        space = types.SimpleNamespace(write=write, read_v2p=read)
        translator = types.SimpleNamespace(space=lambda kind: space if kind == "full" else None)
        return types.SimpleNamespace(_translate_kv_loc=write, kv_index_translator=translator)

    for version in compat.SUPPORTED:
        assert not compat.renames_slots(version, backend(None, None))
        assert compat.renames_slots(version, backend(lambda slots: slots, None))
    assert compat.renames_slots("0.5.23", backend(None, "a table"))


def test_the_backends_of_a_runner() -> None:
    arguments = types.SimpleNamespace(get_attention_backends=lambda: ("fa3", "kdtree_mla"))
    old = types.SimpleNamespace(server_args=arguments)
    new = types.SimpleNamespace(
        prefill_attention_backend_str="fa3", decode_attention_backend_str="kdtree_mla"
    )
    assert compat.attention_backends("0.5.17", old) == ("fa3", "kdtree_mla")
    assert compat.attention_backends("0.5.23", new) == ("fa3", "kdtree_mla")


def test_blocks_are_captured_with_a_mask_where_one_is_filled(modules: Any) -> None:
    """SGLang goes by the class's name, and would capture this backend's chains with a mask."""
    name = "sglang.srt.speculative.dflash_utils"
    utils = modules(name, resolve_dflash_verify_mask_policy=lambda backend: (backend, True))
    compat.capture_blocks(masks=False)
    assert utils.resolve_dflash_verify_mask_policy("ours") == ("ours", False)
    compat.capture_blocks(masks=True)  # a process may decide twice
    assert utils.resolve_dflash_verify_mask_policy("ours") == ("ours", True)


class Parser:
    """Takes arguments as argparse does."""

    def __init__(self) -> None:
        self.flags: dict[str, dict[str, Any]] = {}

    def add_argument(self, flag: str, **named: Any) -> None:
        self.flags[flag] = named


def test_flags_become_environment_variables(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: dict[str, Any] = {}
    registry = types.SimpleNamespace(
        register=lambda target, hook, kind: hooks.update({target: hook})
    )
    modules(
        "sglang.srt.plugins.hook_registry",
        HookRegistry=registry,
        HookType=types.SimpleNamespace(BEFORE="before", AFTER="after"),
    )
    monkeypatch.setenv("KDTREE_DDTREE_TOPK", "3")
    compat.add_flags(
        {
            "--a-budget": ("KDTREE_DDTREE_BUDGET", "Nodes."),
            "--a-top": ("KDTREE_DDTREE_TOPK", "Top."),
        }
    )
    parser = Parser()
    hooks["sglang.srt.server_args.ServerArgs.add_cli_args"](None, parser)
    assert parser.flags["--a-budget"]["type"] is int
    assert "KDTREE_DDTREE_BUDGET" in parser.flags["--a-budget"]["help"]
    given = types.SimpleNamespace(a_budget=16, a_top=None)
    monkeypatch.setenv("KDTREE_DDTREE_BUDGET", "7")  # so that it is put back, as the hook sets it
    hooks["sglang.srt.server_args.ServerArgs.from_cli_args"](object, given)
    assert os.environ["KDTREE_DDTREE_BUDGET"] == "16"
    assert os.environ["KDTREE_DDTREE_TOPK"] == "3", "a flag that is not given changes nothing"


def test_without_a_registry_of_hooks_there_are_the_variables_alone(modules: Any) -> None:
    compat.add_flags({"--a-budget": ("KDTREE_DDTREE_BUDGET", "Nodes.")})
    assert not compat.can_register_algorithms()


@pytest.mark.parametrize(
    ("release", "field"), [("0.5.17", "reserved_seq_lens"), ("0.5.23", "nxt_kv_lens")]
)
def test_reserved_slots_have_a_name_of_each_release(release: str, field: str) -> None:
    draft_input = types.SimpleNamespace(**{f"{field}_cpu": [5, 7], f"{field}_sum": 12})
    assert compat.reserved(release, draft_input) == ([5, 7], 12)


def test_a_release_that_lacks_what_ddtree_needs_is_refused(modules: Any) -> None:
    with pytest.raises(MissingError, match=r"DDTREE: this SGLang 0\.5\.23 lacks .*FutureMap"):
        compat.require_ddtree("0.5.23")
    with pytest.raises(MissingError, match=r"expected 0\.5\.17 or 0\.5\.23"):
        compat.require_ddtree("0.6.0")


class Asked(types.SimpleNamespace):
    """A request with these sampling parameters."""

    def __init__(self, **parameters: Any) -> None:
        super().__init__(sampling_params=types.SimpleNamespace(**parameters))


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({}, "stock: True"),
        ({"frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}, "stock: True"),
        ({"repetition_penalty": None}, "stock: True"),
        ({"repetition_penalty": 1.3}, "DDTREE: repetition_penalty is not supported, expected 1"),
        ({"presence_penalty": -0.5}, "DDTREE: presence_penalty is not supported, expected 0"),
        ({"min_new_tokens": 4}, "DDTREE: min_new_tokens is not supported, expected 0, got 4"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(
    modules: Any, parameters: dict[str, Any], says: str
) -> None:
    compat.refuse_requests("DDTREE")  # no scheduler in this process
    scheduler = modules(
        "sglang.srt.managers.scheduler",
        validate_dflash_request=lambda request, overlap: f"stock: {overlap}",
        validate_spec_sampling_mask_request=None,
    )
    compat.refuse_requests("DDTREE")
    assert says in scheduler.validate_dflash_request(Asked(**parameters), True)
    said = scheduler.validate_spec_sampling_mask_request("request", "algorithm")
    assert said == "DDTREE: return_sampling_mask is not supported"


@pytest.mark.parametrize("given", [(), ("server_args",)])
def test_rows_have_room_for_two_windows(modules: Any, given: tuple[str, ...]) -> None:
    """0.5.17 hands the arguments over."""
    pools = modules(
        "sglang.srt.mem_cache.kv_cache_configurator",
        get_req_to_token_extra_context_len=lambda *_: 37,
    )
    compat.widen_request_rows(67)
    assert pools.get_req_to_token_extra_context_len(*given) == 67
    compat.widen_request_rows(20)
    assert pools.get_req_to_token_extra_context_len(*given) == 67, "never less than it was"


def test_what_refills_a_graph_is_taken_by_release() -> None:
    """By the signatures of `_update_target_verify_buffers` in both."""
    assert compat.verify_refill("0.5.17", ("bs", "lens", "rows", "spec")) == (
        ("bs", "lens", "rows"),
        "spec",
    )
    assert compat.verify_refill("0.5.23", ("plan", "bs", "lens", "spec", "rows")) == (
        ("plan", "bs", "lens", "rows"),
        "spec",
    )


def test_what_lists_slots_is_taken_by_release() -> None:
    """By the signatures of `_fill_kv_indptr_and_indices`; rows may be those of a larger batch."""
    taken = compat.slots_refill("0.5.17", (2, "lens", [5, 6, 7], "slots"), {})
    assert taken == ([5, 6], "lens", "slots", None)
    taken = compat.slots_refill("0.5.23", ("plan", 2, "lens", [5, 6, 7], "slots"), {})
    assert taken == ([5, 6], "lens", "slots", None)
    taken = compat.slots_refill("0.5.23", ("plan", 2, "lens", [5, 6], "slots", "offsets"), {})
    assert taken == ([5, 6], "lens", "slots", "offsets")
    given = ("plan", 2, "lens", [5, 6], "slots")
    taken = compat.slots_refill("0.5.23", given, {"kv_indptr": "offsets"})
    assert taken == ([5, 6], "lens", "slots", "offsets")


def test_what_every_process_of_a_server_loads_is_light() -> None:
    """The launcher and the detokenizer load the plugin too: no kernel, no operations."""
    asked = "import sys, kdtree_engine.sglang_ext.plugin, kdtree_engine.sglang_ext.compat as c; "
    asked += "print([name for name in sys.modules if name.startswith('kdtree_engine')])"
    done = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, check=True, timeout=120
    )
    heavy = ("kdtree_engine.ops", "kdtree_engine.attention", "kdtree_engine.sglang_ext.backend")
    assert "kdtree_engine.sglang_ext.compat" in done.stdout
    assert not any(name in done.stdout for name in heavy), done.stdout
