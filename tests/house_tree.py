"""The house rules about the repository as a whole: who imports whom, names, texts, recipes, packaging."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

from house import PACKAGES, Source, Tree

# Who may import whom inside forklora/. A new room gets a row here.
ROOMS: dict[str, set[str]] = {
    "unembed": {"gathering"},
    "gathering": set(),
    "collective": set(),
    "archive": set(),
    "sketch": set(),
    "losses": set(),
    "optim": set(),
    "measure": set(),
    "spectra": {"measure"},
    "trace": {"archive"},
    "forks": {"trace"},
    "bounds": {"forks", "trace"},
    "attention": set(),
    "cache": {"attention", "unembed"},
    "forward": {"attention", "cache", "gathering", "passes", "unembed"},
    "passes": set(),
    "packing": {"lowrank"},
    "divergence": {"gathering", "unembed"},
    "drawing": {"unembed"},
    "fisher": {"backward", "collective", "trace", "unembed"},
    "rollouts": {"attention", "drawing", "forward", "packing", "trace", "unembed"},
    "backward": {"forward", "sketch", "trace", "unembed"},
    "bases": {
        "archive",
        "backward",
        "collective",
        "drawing",
        "forks",
        "gathering",
        "rollouts",
        "sketch",
        "trace",
        "unembed",
    },
    "spanned": {"gathering"},
    "lowrank": set(),
    "targets": set(),
    "adapter": {"gathering", "lowrank", "packing", "spanned", "targets"},
    "state": {"gathering"},
    "slots": {"adapter", "gathering", "spanned"},
    "attachment": {"adapter", "bases", "rollouts"},
    "export": {"adapter", "collective", "gathering"},
}

FORBIDDEN_NAMES = {"util", "utils", "common", "helper", "helpers", "misc", "core", "base"}
LARGEST_FILE = 1_500_000

# The brackets keep these patterns from finding themselves.
_MACHINE_PATH = re.compile(r"(?<![\w.])/(?:w[o]rk|r[o]ot|t[m]p|h[o]me|f[a]rm|U[s]ers)\b")
_UNFINISHED = re.compile(r"\b(?:T[O]DO|F[I]XME|X[X]X)\b")


def imports(source: Source) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything a file imports; a relative import starts with a dot."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def _place(name: str) -> tuple[str, str]:
    """Package and room of a dotted name: forklora.trainers.rl.X stands in (trainers, rl)."""
    parts = [*name.split("."), "", ""]
    if parts[0] == "forklora" and parts[1] in PACKAGES:
        return parts[1], parts[2]
    return parts[0], parts[1]


def _misdirection(source: Source, name: str) -> str | None:
    package, room = _place(name)
    here = source.path.stem
    if name.startswith("."):
        return f"relative import of {name}: write the absolute name"
    if name.partition(".")[0] in ("trainers", "recipes"):
        return f"{name} clashes with other people's packages: import forklora.{name}"
    if source.package not in PACKAGES or package not in PACKAGES:
        return None
    if PACKAGES.index(package) > PACKAGES.index(source.package):
        return f"{source.package}/ may not import {name}: imports go downward only"
    if source.package == "forklora" and here not in ("__init__", room) and room not in ROOMS.get(here, ()):
        return f"{here} may not import {name}; it may import {sorted(ROOMS.get(here, ())) or 'nothing of ours'}"
    return None


def directions(tree: Tree) -> list[str]:
    """Imports go downward only: recipes -> trainers -> forklora, and inside forklora as the table says."""
    found = [
        source.at(line, message)
        for source in tree.sources
        for line, name in imports(source)
        if (message := _misdirection(source, name))
    ]
    rooms = [source for source in tree.sources if source.package == "forklora" and source.path.stem != "__init__"]
    return found + [
        source.at(1, "the room has no row in ROOMS (tests/house_tree.py): say there what it may import")
        for source in rooms
        if source.path.stem not in ROOMS
    ]


def cycles(tree: Tree) -> list[str]:
    """Inside trainers/ and recipes/ no two rooms import each other, directly or through others."""
    graph: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
    for source in tree.packaged:
        here = (source.package, source.path.stem)
        graph[here] = {
            place: source.at(line, f"{name} closes a circle of imports")
            for line, name in imports(source)
            if (place := _place(name))[0] == here[0] and place != here
        }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle = error.args[1]
        return [graph[importer][imported] for imported, importer in pairwise(circle)]
    return []


def light_import(tree: Tree) -> list[str]:
    """`import forklora` loads nothing but the standard library; each room brings its own libraries."""
    code = (
        "import sys; before = set(sys.modules); import forklora; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(*sorted(new - set(sys.stdlib_module_names) - {'forklora'}))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=tree.root, capture_output=True, text=True, check=True)
    return [
        f"forklora/__init__.py:1: import forklora loads {name}: look names up lazily" for name in run.stdout.split()
    ]


def names(tree: Tree) -> list[str]:
    """No drawer for odds and ends: a module is named after what it does."""
    return [
        source.at(1, "a name that says nothing: call the module by what it turns into what")
        for source in tree.sources
        if FORBIDDEN_NAMES & {part.removesuffix(".py") for part in source.path.parts}
    ]


def named_tests(tree: Tree) -> list[str]:
    """A test module is named after the room it tests (test_ROOM.py or test_ROOM_ASPECT.py), or after the laws."""
    rooms = {source.path.stem for source in tree.packaged} | {*PACKAGES, "house", "laws"}
    return [
        source.at(1, "no room of that name: call it test_ROOM.py, test_ROOM_ASPECT.py or test_laws_ASPECT.py")
        for source in tree.sources
        if source.package == "tests" and source.path.stem.startswith("test_")
        if not any(f"{source.path.stem}_".startswith(f"test_{room}_") for room in rooms)
    ]


def texts(tree: Tree) -> list[str]:
    """No path of somebody's machine, nothing left to do, in any file that goes into the repository."""
    found = []
    for path in tree.files:
        try:
            lines = (tree.root / path).read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        marks = ((_MACHINE_PATH, "a path of one machine"), (_UNFINISHED, "unfinished: do it, or file it as an issue"))
        found += [
            f"{path.as_posix()}:{number}: {message}"
            for number, line in enumerate(lines, 1)
            for pattern, message in marks
            if pattern.search(line)
        ]
    return found


def large_files(tree: Tree) -> list[str]:
    """Weights, traces and pictures of runs do not belong in the repository."""
    sizes = [(path, (tree.root / path).stat().st_size) for path in tree.files]
    return [f"{path.as_posix()}:1: {size} bytes, too large" for path, size in sizes if size > LARGEST_FILE]


def recipes_load(tree: Tree) -> list[str]:
    """Every recipe in the repository is one that the command accepts."""
    from forklora.recipes.config import load_recipe

    found = []
    for path in tree.files:
        if path.parent == Path("recipes") and path.suffix in (".yaml", ".yml"):
            try:
                load_recipe(tree.root / path, [])
            except ValueError as error:
                found.append(f"{path.as_posix()}:1: {error}")
    return found


def packaging(tree: Tree) -> list[str]:
    """Every folder of code and every data file is installed; every dependency has its tried version."""
    project = tomllib.loads((tree.root / "pyproject.toml").read_text(encoding="utf-8"))
    setup = project["tool"]["setuptools"]
    folders = {setup["package-dir"][package]: package for package in setup["packages"]}
    pinned = (tree.root / "constraints.txt").read_text(encoding="utf-8").lower().replace("_", "-")
    found = [
        source.at(1, f"pyproject.toml does not install {source.path.parent.as_posix()}/")
        for source in tree.packaged
        if source.path.parent.as_posix() not in folders
    ]
    for path in tree.files:
        patterns = setup["package-data"].get(folders.get(path.parts[0], ""), ())
        inside = path.relative_to(path.parts[0]).as_posix()
        if path.parts[0] in PACKAGES and path.suffix != ".py" and not any(fnmatch(inside, p) for p in patterns):
            found.append(f"{path.as_posix()}:1: no package-data pattern in pyproject.toml matches this file")
    extras = project["project"].get("optional-dependencies", {}).values()
    for need in sum(extras, project["project"]["dependencies"]):
        name = re.match(r"[\w-]+", need).group().lower().replace("_", "-")
        if name != "forklora" and not re.search(rf"^{name}==", pinned, re.MULTILINE):
            found.append(f"constraints.txt:1: {name} stands in pyproject.toml and has no tried version here")
    return found


TREE_RULES = (
    directions,
    cycles,
    light_import,
    names,
    named_tests,
    texts,
    large_files,
    recipes_load,
    packaging,
)
