"""The content hash of a gate: evidence is stale once what the gate depends on has changed.

A gate depends on the module that its check lives in, on every module of this repository that this
one imports, directly or not, and on the files that `Gate.data` names. Imports are read from the
syntax tree, so nothing has to be declared. What is imported by a name made up at run time is not
seen; a test refuses such imports behind gates.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import pathlib
import re
from collections.abc import Iterator

from phases.gate import Check, Gate

__all__ = ["gate_content", "imported_files"]

_ROOMS = {"phases": ".", "remote": ".", "kdtree_engine": "kdtree-engine"}

# These carry verdicts and do not make them: a new word in a remedy must not age all evidence.
_FRAMEWORK = frozenset({"phases.gate", "phases.phase", "phases.requirement"})
_DECLARATION = re.compile(r"phases\.p\d+_\w+")
"""A phase's package: it lists the gates, and so imports the checks of all of them. Importing one of
its modules runs it, but a gate does not depend on the gates beside it. What it says of a gate that
its verdict depends on, `data` and the arguments of a partial check, is hashed by itself."""


def gate_content(root: pathlib.Path, gate: Gate) -> str | None:
    """SHA-256, in hex, over the paths and bytes that `gate` depends on; None while unwritten."""
    if gate.check is None:
        return None
    files = set(imported_files(root, _module_of(gate.check)))
    for pattern in gate.data:
        files.update(path for path in root.glob(pattern) if path.is_file())
    digest = hashlib.sha256(gate.name.encode())
    digest.update(_bound(gate.check).encode())
    for path in sorted(files):
        digest.update(f"\0{path.relative_to(root).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def imported_files(root: pathlib.Path, module: str) -> list[pathlib.Path]:
    """The files of this repository, under `root`, that `import module` would run."""
    found: dict[str, pathlib.Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _path(root, name)
        framework = name in _FRAMEWORK or _DECLARATION.fullmatch(name)
        if name in found or framework or path is None:
            continue
        found[name] = path
        if "." in name:
            waiting.append(name.rpartition(".")[0])
        waiting.extend(_imports(root, name, path, path.stat().st_mtime_ns))
    return sorted(found.values())


def _bound(check: Check) -> str:
    """What a partial check is given, in words; nothing for a plain function."""
    said = ""
    while isinstance(check, functools.partial):
        said += f"\0{check.args!r}{sorted(check.keywords.items())!r}"
        check = check.func
    return said


def _module_of(check: Check) -> str:
    while isinstance(check, functools.partial):
        check = check.func
    return str(check.__module__)


def _path(root: pathlib.Path, name: str) -> pathlib.Path | None:
    first = name.partition(".")[0]
    if first not in _ROOMS:
        return None
    base = root / _ROOMS[first] / name.replace(".", "/")
    for candidate in (base / "__init__.py", base.with_suffix(".py")):
        if candidate.is_file():
            return candidate
    return None


@functools.cache
def _imports(root: pathlib.Path, name: str, path: pathlib.Path, mtime_ns: int) -> list[str]:
    """What a module imports. mtime_ns: of its file, which is read again once that has changed."""
    return list(_imported(root, name, path))


def _imported(root: pathlib.Path, name: str, path: pathlib.Path) -> Iterator[str]:
    for node in _executed(ast.parse(path.read_bytes(), filename=str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
                if _DECLARATION.fullmatch(alias.name):
                    yield f"{alias.name}.__init__"
                if alias.name == "kdtree_engine":
                    yield from _all_modules(root, alias.name)
        elif isinstance(node, ast.ImportFrom):
            source = _absolute(name, path, node)
            yield source
            for alias in node.names:
                member = f"{source}.{alias.name}"
                if _path(root, member) is not None:
                    yield member
                elif _DECLARATION.fullmatch(source):
                    yield f"{source}.__init__"  # more than a declaration: a name is taken from it
                elif source == "kdtree_engine":
                    # A lazily loaded attribute: any module of the package may be behind it.
                    yield from _all_modules(root, source)


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those in the body of `if TYPE_CHECKING:`, which never runs."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            for other in node.orelse:
                yield other
                yield from _executed(other)
            continue
        yield node
        yield from _executed(node)


def _is_type_checking(test: ast.expr) -> bool:
    name = test.id if isinstance(test, ast.Name) else getattr(test, "attr", "")
    return name == "TYPE_CHECKING"


def _absolute(name: str, path: pathlib.Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for _ in range(node.level - 1):
        package = package.rpartition(".")[0]
    return f"{package}.{node.module}" if node.module else package


def _all_modules(root: pathlib.Path, package: str) -> Iterator[str]:
    base = root / _ROOMS[package]
    for path in (base / package).rglob("*.py"):
        parts = path.relative_to(base).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
