"""Router traces: the documented lines, and files that are none."""

from __future__ import annotations

import json
import pathlib

import pytest

from kdtree_engine.errors import ConfigError
from kdtree_engine.moe.trace import read_routing

HEADER = {"format": "router-trace", "version": 1, "experts": 4, "top_k": 2}


def line(step: int, layer: int, *experts: list[int]) -> dict[str, object]:
    return {"step": step, "layer": layer, "experts": list(experts)}


def write(folder: pathlib.Path, *lines: object) -> pathlib.Path:
    path = folder / "router.jsonl"
    path.write_text(
        "".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in lines)
    )
    return path


def test_lines_in_any_order_are_counts_by_step_and_layer(tmp_path: pathlib.Path) -> None:
    path = write(
        tmp_path,
        HEADER,
        line(7, 2, [0, 1]),
        line(3, 1, [0, 1], [1, 2]),
        "",
        line(7, 1, [2, 3]),
        line(3, 2, [3, 0], [3, 1]),
    )
    found = read_routing(path, top_k=8)
    assert (found.top_k, found.layers, found.tokens.tolist()) == (2, (1, 2), [2, 1])
    assert found.counts.tolist() == [[[1, 2, 1, 0], [1, 1, 0, 2]], [[0, 0, 1, 1], [1, 1, 0, 0]]]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ((), "line 1"),
        (("[]",), "line 1"),
        (({**HEADER, "version": 2},), "line 1: .*version 1"),
        (({**HEADER, "top_k": 5},), "line 1: .*top_k is 5 of 4"),
        ((HEADER,), "no step"),
        (({**HEADER, "experts": 65535},), "experts: expected a whole number below 4096"),
        ((HEADER, '{"step": 0, "lay'), "line 2"),
        ((HEADER, line(0, 1, [0, 1]), line(0, 1, [0, 1])), "line 3: .*stands there twice"),
        ((HEADER, line(0, 1, [0, 4])), "line 2: .*not among 4 experts"),
        ((HEADER, line(0, 1, [1, 1])), "line 2: .*one expert twice"),
        ((HEADER, line(0, 1, [1])), "line 2: .*2 experts each"),
        ((HEADER, line(0, 1)), "line 2: .*2 experts each"),
        ((HEADER, line(0, 1, [True, 1])), "line 2: .*whole number"),  # type: ignore[list-item]
        ((HEADER, line(-1, 1, [0, 1])), "line 2: .*step"),
        ((HEADER, line(0, 1, [0, 1]), line(1, 2, [0, 1])), "other layers than the first"),
        ((HEADER, line(0, 1, [0, 1]), line(0, 2, [0, 1], [0, 1])), "layers count 2 to 4"),
    ],
)
def test_damage_is_one_line_with_its_place(
    tmp_path: pathlib.Path, lines: tuple[object, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        read_routing(write(tmp_path, *lines), top_k=8)
    assert "\n" not in str(caught.value)
    assert "router.jsonl" in str(caught.value)


def test_bytes_and_a_folder_are_no_trace(tmp_path: pathlib.Path) -> None:
    (tmp_path / "router.jsonl").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "router.jsonl", tmp_path, tmp_path / "none.jsonl"):
        with pytest.raises(ConfigError):
            read_routing(path, top_k=8)
