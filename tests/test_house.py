"""The rules of the house hold for this repository, and each of them can fail.

Every rule is tried on small bad trees (it must name the place) and on their nearest good neighbors (it must be silent).
"""

import subprocess
from pathlib import Path

import pytest

import house
import house_tree
from house import CODE_RULES, Tree
from house_tree import TREE_RULES

ROOT = Path(__file__).resolve().parent.parent
RULES = (*CODE_RULES, *TREE_RULES)

# Written apart, so that this file keeps the rules it tests.
FOLDER, MARK = "tm" + "p", "TO" + "DO"
BLOCK = "\n".join(f"    x{i} = {i}" for i in range(house.TWIN_LINES))
NESTED = "def f(x):\n    for a in x:\n        with a:\n            if a:\n                "
PROJECT = """
[project]
dependencies = ["some_package[extra]>=1"]
[project.optional-dependencies]
all = ["forklora[rl]", "other"]
[tool.setuptools]
packages = ["forklora"]
[tool.setuptools.package-dir]
forklora = "forklora"
[tool.setuptools.package-data]
forklora = ["data/*.json"]
"""
PINNED = {"pyproject.toml": PROJECT, "constraints.txt": "Some-Package==1.0\nother==2\n"}
ROOM = {path: f'"""{path}."""\n' for path in ("forklora/trace.py", "forklora/forks.py")}


def bad(rule, place, *, says, **case):
    """One tree that breaks one rule, the place the rule must name and a part of what it must say."""
    return pytest.param(rule, case["files"], f"{place}: ", says, id=f"{rule.__name__}-{case.get('name', place)}")


def one(path, text, **more):
    """A bad case of one file."""
    return {"files": {path: text}, **more}


BAD = [
    bad(house.file_length, "tests/test_laws.py:301", says="301 lines", **one("tests/test_laws.py", "\n" * 301)),
    bad(
        house.function_length,
        "forklora/a.py:2",
        says="C.f has 51 lines",
        **one("forklora/a.py", 'class C:\n    def f():\n        """D\n\n        """\n' + "        x\n" * 50),
    ),
    bad(house.nesting, "forklora/a.py:5", says="f nests 4", **one("forklora/a.py", NESTED + "while x: pass\n")),
    bad(
        house.nesting,
        "forklora/b.py:7",
        says="f nests 4",
        **one("forklora/b.py", NESTED + "pass\n            else:\n                if x: pass\n"),
    ),
    bad(
        house.arguments,
        "trainers/a.py:1",
        says="8 arguments",
        **one("trainers/a.py", "def f(a, *, b, c, d, e, f, g, h): pass\n"),
    ),
    bad(
        house.arguments,
        "recipes/a.py:2",
        says="3 of them positional",
        **one("recipes/a.py", "class C:\n    def __init__(self, a, b, c): pass\n"),
    ),
    bad(
        house.arguments,
        "forklora/a.py:3",
        says="C.f takes 3",
        **one("forklora/a.py", "class C:\n    @staticmethod\n    def f(a, b, /, c): pass\n"),
    ),
    bad(house.broad_except, "tests/a.py:3", says="broad", **one("tests/a.py", "try:\n    x\nexcept: pass\n")),
    bad(
        house.broad_except,
        "tests/b.py:3",
        says="broad",
        **one("tests/b.py", "try:\n    x\nexcept (OSError, Exception) as e: pass\n"),
    ),
    bad(
        house.broad_except, "recipes/a.py:1", says="broad", **one("recipes/a.py", "with a.suppress(BaseException): b\n")
    ),
    bad(house.printing, "recipes/run.py:2", says="print", **one("recipes/run.py", "def f():\n    print(1)\n")),
    bad(house.docstrings, "forklora/a.py:1", says="the module", **one("forklora/a.py", "x = 1\n")),
    bad(
        house.docstrings,
        "forklora/b.py:5",
        says="C.f has no",
        **one("forklora/b.py", '"""M."""\nif x:\n    class C:\n        """C."""\n        def f(self): pass\n'),
    ),
    bad(house.docstrings, "forklora/c.py:2", says="f has no", **one("forklora/c.py", '"""M."""\ndef f(): pass\n')),
    bad(
        house.twins,
        "trainers/b.py:5",
        says="forklora/a.py:2",
        files={
            "forklora/a.py": f"def f():\n{BLOCK}\n",
            "trainers/b.py": f"if 1:\n\n\n    import os\n{BLOCK.replace('    x3', '    # why' + chr(10) + '    x3')}\n",
        },
    ),
    bad(
        house_tree.directions,
        "forklora/trace.py:2",
        says="trace may not import forklora.forks",
        **one("forklora/trace.py", "def f():\n    from forklora.forks import Forks\n"),
    ),
    bad(
        house_tree.directions,
        "forklora/forks.py:1",
        says="it may import ['trace']",
        **one("forklora/forks.py", "from forklora import Trace\n"),
    ),
    bad(
        house_tree.directions,
        "forklora/bases.py:1",
        says="downward",
        **one("forklora/bases.py", "import forklora.trainers.rl\n"),
    ),
    bad(
        house_tree.directions,
        "trainers/rl.py:1",
        says="downward",
        **one("trainers/rl.py", "from forklora import recipes\n"),
    ),
    bad(house_tree.directions, "tests/a.py:1", says="clashes", **one("tests/a.py", "from trainers import rl\n")),
    bad(house_tree.directions, "recipes/a.py:1", says="relative", **one("recipes/a.py", "from .b import c\n")),
    bad(house_tree.directions, "forklora/new.py:1", says="no row", **one("forklora/new.py", "x = 1\n")),
    bad(
        house_tree.cycles,
        "trainers/a.py:1",
        says="circle",
        files={
            "trainers/a.py": "from forklora.trainers.b import x\n",
            "trainers/b.py": "import forklora.trainers.a\n",
        },
    ),
    bad(
        house_tree.light_import,
        "forklora/__init__.py:1",
        says="loads safetensors",
        **one("forklora/__init__.py", "import json, safetensors\n"),
    ),
    bad(house_tree.names, "trainers/utils.py:1", says="says nothing", **one("trainers/utils.py", "")),
    bad(house_tree.names, "tests/helpers/a.py:1", says="says nothing", **one("tests/helpers/a.py", "")),
    bad(
        house_tree.named_tests,
        "tests/test_tracer.py:1",
        says="no room",
        files={**ROOM, "tests/test_tracer.py": "", "tests/test_trace.py": ""},
    ),
    bad(house_tree.texts, "docs.md:2", says="path of one machine", **one("docs.md", f"a\nsee `/{FOLDER}/x`\n")),
    bad(house_tree.texts, "recipes/a.yaml:1", says="path of", **one("recipes/a.yaml", f"output: /{FOLDER}\n")),
    bad(house_tree.texts, "forklora/a.py:1", says="unfinished", **one("forklora/a.py", f"x = 1  # {MARK}: y\n")),
    bad(house_tree.large_files, "a.bin:1", says="too large", **one("a.bin", "x" * (house_tree.LARGEST_FILE + 1))),
    bad(house_tree.recipes_load, "recipes/a.yaml:1", says="armz", **one("recipes/a.yaml", "name: a\narmz: []\n")),
    bad(house_tree.packaging, "forklora/new/a.py:1", says="not install", files={**PINNED, "forklora/new/a.py": ""}),
    bad(house_tree.packaging, "forklora/a.json:1", says="package-data", files={**PINNED, "forklora/a.json": ""}),
    bad(
        house_tree.packaging,
        "constraints.txt:1",
        says="some-package",
        files={**PINNED, "constraints.txt": "some-package-more==1\nother==2\n"},
    ),
]

GOOD = {
    house.file_length: {"forklora/a.py": "\n" * 300},
    house.function_length: {"forklora/a.py": '@d\ndef f():\n    """D\n\n    """\n' + "    x\n" * 49},
    house.nesting: {
        "forklora/a.py": NESTED + "pass\n            elif x:\n                pass\n",
        "forklora/b.py": NESTED + "def g():\n                    if x: pass\n",
    },
    house.arguments: {
        "forklora/a.py": "class C:\n    def f(self, a, b, *c, d, e, f, g, h, **i): pass\n",
        "forklora/b.py": "class C:\n    def __exit__(self, kind, error, trace): pass\n",
        "tests/test_a.py": "def test_a(a, b, c): pass\n",
    },
    house.broad_except: {"forklora/a.py": "try:\n    x\nexcept (OSError, ValueError): raise Exception\n"},
    house.printing: {"recipes/cli.py": "print(1)\n", "forklora/a.py": "table.print(1)\n"},
    house.docstrings: {
        "forklora/a.py": '"""M."""\nclass _P:\n    def f(self): pass\ndef f():\n    """F."""\n    def g(): pass\n',
    },
    house.twins: {
        "forklora/a.py": f"def f():\n{BLOCK}\n",
        "forklora/b.py": f"def g():\n{BLOCK.replace('x4', 'y4')}\n",
        "tests/c.py": f"def f():\n{BLOCK}\n",
    },
    house_tree.directions: {
        "forklora/__init__.py": "from forklora.bases import Bases\n",
        "forklora/forks.py": "import torch.trainers\nfrom forklora.trace import Trace\n",
        "trainers/rl.py": "from forklora import forks\nfrom forklora.trainers.sampling import x\n",
        "recipes/run.py": "import forklora.trainers.rl\n",
    },
    house_tree.cycles: {
        "trainers/a.py": "from forklora.trainers.b import x\nfrom forklora.a import y\n",
        "trainers/b.py": "import forklora.trainers.c\n",
    },
    house_tree.light_import: {"forklora/__init__.py": "import json, sqlite3\n"},
    house_tree.names: {"recipes/compare.py": "", "tests/score_base.py": ""},
    house_tree.named_tests: {**ROOM, "tests/test_forks_rule.py": "", "tests/test_laws.py": "", "tests/tiny.py": ""},
    house_tree.texts: {
        "a.md": f"`runs/{FOLDER}/x`, https://example.org/{FOLDER}, /{FOLDER}s, {MARK}S, {MARK.lower()}\n"
    },
    house_tree.large_files: {"a.bin": "x" * house_tree.LARGEST_FILE},
    house_tree.recipes_load: {"recipes/grids/a.yaml": "x: 1\n", "recipes/a.json": "{}"},
    house_tree.packaging: {**PINNED, "forklora/a.py": "", "forklora/data/b.json": "", "tests/c.json": ""},
}


def planted(root, files):
    """A tree with these files."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return Tree.of(root)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_holds_here(rule):
    found = rule(Tree.of(ROOT))
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(("rule", "files", "place", "says"), BAD)
def test_the_rule_names_the_fault_and_its_place(rule, files, place, says, tmp_path):
    found = rule(planted(tmp_path, files))
    assert [line for line in found if line.startswith(place) and says in line], found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_lets_the_nearest_good_neighbor_pass(rule, tmp_path):
    assert rule(planted(tmp_path, GOOD[rule])) == []


def test_every_rule_is_shown_to_fail():
    assert {case.values[0] for case in BAD} == set(RULES)


def test_an_exemption_covers_its_function_and_is_a_failure_when_nothing_needs_it(tmp_path):
    tree = planted(tmp_path, {"forklora/a.py": "class C:\n    def f(self, a, b, c): pass\n"})
    assert house.arguments(tree, {"forklora/a.py:C.f": "theirs"}) == []
    stale = house.arguments(tree, {"forklora/a.py:C.f": "theirs", "forklora/a.py:C.g": "gone"})
    assert stale == ["forklora/a.py:1: C.g needs no exemption from the argument budget"]


def test_a_tree_leaves_out_what_git_ignores(tmp_path):
    (tmp_path / "forklora").mkdir()
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    tree = planted(tmp_path, {".gitignore": "runs/\n", "runs/a.md": "x", "forklora/a.py": "x = 1\n"})
    assert tree.files == [Path(".gitignore"), Path("forklora/a.py")]
