"""What the house rules read (the tree), and the rules about single pieces of code.

A rule is a function from a `Tree` to a list of failures, each one line "path:line: what is wrong, and the way out". The
rules about the repository as a whole stand in house_tree.py; test_house.py runs both, and shows that each can fail.
"""

import ast
import io
import subprocess
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

PACKAGES = ("forklora", "trainers", "recipes")

FILE_LINES = 300
FUNCTION_LINES = 50
NESTING = 3
ARGUMENTS = 7
POSITIONAL = 2
POSITIONAL_PRIVATE = 4
TWIN_LINES = 8

# Functions that may take more positional arguments, "path:name" -> who prescribes it. An entry that exempts nothing is
# itself a failure.
EXEMPT = {
    "forklora/adapter.py:ForkLinear.__init__": "peft.tuners.lora.Linear, as the dispatcher calls it",
    "forklora/adapter.py:ForkVariant.forward": "peft.tuners.lora.variants.LoraVariant",
    "forklora/adapter.py:ForkVariant.init": "peft.tuners.lora.variants.LoraVariant",
    "forklora/adapter.py:ForkVariant.merge_safe": "peft.tuners.lora.variants.LoraVariant",
    "forklora/adapter.py:ForkVariant.merge_unsafe": "peft.tuners.lora.variants.LoraVariant",
    "forklora/adapter.py:ForkVariant.unmerge": "peft.tuners.lora.variants.LoraVariant",
    "forklora/adapter.py:add_fork_lora": "the call add_fork_lora(model, config, bases) of the documentation",
    "forklora/attention.py:shared_attention": "transformers.AttentionInterface",
    "forklora/backward.py:listening.listen.forward": "a forward hook of torch.nn.Module",
    "forklora/bases.py:collect_bases": "the call collect_bases(model, tokenizer, prompts, ...) of the documentation",
    "recipes/watch.py:Watch.on_log": "transformers.TrainerCallback",
    "recipes/watch.py:Watch.on_train_begin": "transformers.TrainerCallback",
    "trainers/drift.py:DriftCallback.on_step_end": "transformers.TrainerCallback",
    "trainers/drift.py:DriftCallback.on_train_begin": "transformers.TrainerCallback",
    "trainers/refresh.py:RefreshCallback.on_step_end": "transformers.TrainerCallback",
    "trainers/refresh.py:RefreshCallback.on_train_begin": "transformers.TrainerCallback",
    "trainers/rl.py:ForkGRPOTrainer.__init__": "trl.GRPOTrainer",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_BLOCK = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)


@dataclass(frozen=True)
class Source:
    """One Python file: its path from the root, its text and its syntax tree."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        """The top folder: forklora, trainers, recipes or tests."""
        return self.path.parts[0]

    def at(self, line: int, message: str) -> str:
        """A failure at one line."""
        return f"{self.path.as_posix()}:{line}: {message}"


@dataclass(frozen=True)
class Tree:
    """A repository: its files (from the root; what git does not ignore) and its Python sources."""

    root: Path
    files: list[Path]
    sources: list[Source]

    @classmethod
    def of(cls, root: Path) -> "Tree":
        """Read the repository at `root`."""
        if (root / ".git").exists():
            command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
            listed = subprocess.run(command, capture_output=True, check=True, text=True).stdout.split("\0")
        else:
            listed = [str(path.relative_to(root)) for path in root.rglob("*")]
        files = sorted({Path(name) for name in listed if name and (root / name).is_file()})
        python = [path for path in files if path.suffix == ".py" and path.parts[0] in (*PACKAGES, "tests")]
        texts = {path: (root / path).read_text(encoding="utf-8") for path in python}
        return cls(root, files, [Source(path, text, ast.parse(text, str(path))) for path, text in texts.items()])

    @property
    def packaged(self) -> list[Source]:
        """The sources that are installed: everything but the tests."""
        return [source for source in self.sources if source.package in PACKAGES]


def functions(node: ast.AST, prefix: str = "", in_class: bool = False) -> Iterator[tuple[str, Function, bool]]:
    """Every function below `node`: qualified name, definition, whether it stands directly in a class."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _FUNCTION):
            yield prefix + child.name, child, in_class
            yield from functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.ClassDef):
            yield from functions(child, f"{prefix}{child.name}.", True)
        else:
            yield from functions(child, prefix, in_class)


def file_length(tree: Tree) -> list[str]:
    """No file is longer than one can keep in mind."""
    lengths = [(source, len(source.text.splitlines())) for source in tree.sources]
    return [
        source.at(FILE_LINES + 1, f"the file has {lines} lines, {FILE_LINES} are allowed: split the room")
        for source, lines in lengths
        if lines > FILE_LINES
    ]


def function_length(tree: Tree) -> list[str]:
    """No function is longer than a screen; its docstring does not count."""
    found = []
    for source in tree.sources:
        for name, node, _ in functions(source.tree):
            opening = node.body[0]
            documented = ast.get_docstring(node, clean=False) is not None
            docstring = opening.end_lineno - opening.lineno + 1 if documented else 0
            lines = node.end_lineno - node.lineno + 1 - docstring
            if lines > FUNCTION_LINES:
                found.append(source.at(node.lineno, f"{name} has {lines} lines, {FUNCTION_LINES} are allowed"))
    return found


def _deepest(node: ast.AST, level: int = 0) -> tuple[int, int]:
    deepest = (level, getattr(node, "lineno", 0))
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*_FUNCTION, ast.ClassDef)):
            continue
        is_elif = isinstance(node, ast.If) and child in node.orelse and child.col_offset == node.col_offset
        below = level + (isinstance(child, _BLOCK) and not is_elif)
        deepest = max(deepest, _deepest(child, below), key=lambda found: found[0])
    return deepest


def nesting(tree: Tree) -> list[str]:
    """Blocks inside a function are nested three deep at most; an elif is as deep as its if."""
    found = []
    for source in tree.sources:
        for name, node, _ in functions(source.tree):
            level, line = _deepest(node)
            if level > NESTING:
                found.append(source.at(line, f"{name} nests {level} blocks, {NESTING} are allowed: leave early"))
    return found


def _counts(node: Function, bound: bool) -> tuple[int, int]:
    given = node.args
    positional = len(given.posonlyargs) + len(given.args) - bound
    return positional + len(given.kwonlyargs), positional


def arguments(tree: Tree, exempt: Mapping[str, str] = MappingProxyType(EXEMPT)) -> list[str]:
    """Seven arguments at most, keyword-only past two (past four in private functions, read beside their one caller).

    self and cls, *args and **kwargs do not count.
    """
    found = []
    for source in tree.packaged:
        path = source.path.as_posix()
        unused = {key.removeprefix(f"{path}:") for key in exempt if key.startswith(f"{path}:")}
        for name, node, in_class in functions(source.tree):
            static = any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in node.decorator_list)
            total, positional = _counts(node, in_class and not static)
            # The language itself fixes what __exit__ and its like receive; the three left are ours to shape.
            prescribed = name.endswith("__") and node.name not in ("__init__", "__new__", "__call__")
            allowed = POSITIONAL_PRIVATE if node.name.startswith("_") and node.name != "__init__" else POSITIONAL
            if prescribed or (total <= ARGUMENTS and positional <= allowed):
                continue
            if name in unused:
                unused.remove(name)
            else:
                message = f"{name} takes {total} arguments ({ARGUMENTS} are allowed), {positional} of them positional"
                found.append(source.at(node.lineno, f"{message} ({allowed} are allowed: put a * before the others)"))
        found += [source.at(1, f"{name} needs no exemption from the argument budget") for name in sorted(unused)]
    return found


def _names(node: ast.AST | None) -> set[str]:
    return {getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(node)} if node else {"Exception"}


def broad_except(tree: Tree) -> list[str]:
    """No handler that swallows faults nobody thought of."""
    found = []
    for source in tree.sources:
        for node in ast.walk(source.tree):
            suppresses = isinstance(node, ast.Call) and "suppress" in _names(node.func)
            caught = set().union(*map(_names, node.args)) if suppresses else set()
            if isinstance(node, ast.ExceptHandler):
                caught = _names(node.type)
            if caught & {"Exception", "BaseException"}:
                found.append(source.at(node.lineno, "a broad except: name the errors that are expected here"))
    return found


def printing(tree: Tree) -> list[str]:
    """Only the command line prints."""
    return [
        source.at(node.lineno, "print outside the command (recipes/cli.py, verbs.py): return the text, or log it")
        for source in tree.packaged
        if source.path.as_posix() not in ("recipes/cli.py", "recipes/verbs.py")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def _undocumented(node: ast.AST, prefix: str = "") -> Iterator[tuple[int, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*_FUNCTION, ast.ClassDef)):
            marks = set().union(*map(_names, child.decorator_list)) if child.decorator_list else set()
            if child.name.startswith("_") or marks & {"overload", "setter", "deleter"}:
                continue
            if not ast.get_docstring(child):
                yield child.lineno, prefix + child.name
            if isinstance(child, ast.ClassDef):
                yield from _undocumented(child, f"{prefix}{child.name}.")
        elif isinstance(child, (ast.If, ast.Try)):
            yield from _undocumented(child, prefix)


def docstrings(tree: Tree) -> list[str]:
    """Every public module, class, function and method says what it is."""
    found = []
    for source in tree.packaged:
        if not ast.get_docstring(source.tree):
            found.append(source.at(1, "the module has no docstring"))
        found += [source.at(line, f"{name} has no docstring") for line, name in _undocumented(source.tree)]
    return found


def _code_lines(source: Source) -> list[tuple[int, str]]:
    """Line number and normalized text of every line that holds code: no comments, no imports, no blank lines."""
    imports = (ast.Import, ast.ImportFrom)
    skipped = {
        line
        for node in ast.walk(source.tree)
        if isinstance(node, imports)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    lines = source.text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    stripped = [(number, " ".join(line.split())) for number, line in enumerate(lines, 1) if number not in skipped]
    return [(number, line) for number, line in stripped if line]


def twins(tree: Tree) -> list[str]:
    """No block of eight lines stands in two files."""
    first: dict[tuple[str, ...], tuple[Source, int]] = {}
    found = {}
    for source in tree.packaged:
        lines = _code_lines(source)
        for start in range(len(lines) - TWIN_LINES + 1):
            block = tuple(line for _, line in lines[start : start + TWIN_LINES])
            other, line = first.setdefault(block, (source, lines[start][0]))
            if other is not source:
                message = f"{TWIN_LINES} lines that also stand at {other.at(line, 'make one piece serve both')}"
                # Of overlapping blocks between the same two files the first one tells all.
                found.setdefault((source.path, other.path), source.at(lines[start][0], message))
    return list(found.values())


CODE_RULES = (file_length, function_length, nesting, arguments, broad_except, printing, docstrings, twins)
