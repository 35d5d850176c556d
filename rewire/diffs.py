"""What rewiring changed in the user's source: `rewire.source` for one block, `rewire.diff` for all files."""

from __future__ import annotations

import dataclasses
import difflib
import linecache
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FunctionType
from typing import TypeAlias

from torch import nn

from rewire.code.edited import edits_of, is_edited, original_class
from rewire.code.text import Text, lines_of, text_of
from rewire.errors import RewireError, UnknownName, check_type, did_you_mean
from rewire.passes.editing.apply import is_opened
from rewire.passes.editing.helper_gate import HelperGate
from rewire.runtime.connection import connections, learned_connections

#: One of difflib's opcodes: the kind of difference, and the ranges of old and of new lines.
Opcode: TypeAlias = tuple[str, int, int, int, int]


def diff(model: nn.Module) -> str:
    """A unified diff of everything that rewiring changed in the source files of a rewired model.

    The ``@@`` line of each hunk names the modules that run the changed code. If one function was changed differently
    for different modules, its file has several diffs, each against the file as it is. The files themselves are not
    changed: only this model runs the changed functions.

    Args:
        model: a rewired model.

    Returns:
        The diff, with files in the order of the model's modules. Their paths are relative to the current directory or
        to ``site-packages`` if they are below one of these, else absolute.

    Raises:
        RewireError: the model was not rewired, or a file has changed since.
        TypeError: ``model`` is not a module.

    Example:
        >>> print(rewire.diff(rewired))  # doctest: +ELLIPSIS
        --- a/...
    """
    learned_connections(model)
    files: dict[str, list[_Rewritten]] = {}
    for rewritten in _rewritten(model):
        files.setdefault(rewritten.text.file, []).append(rewritten)
    return "".join(_file_diff(file, chosen) for file, found in files.items() for chosen in _one_text_each(found))


def source(model: nn.Module, path: str) -> str:
    """The source of the edited forward of the block at ``path``, and of the edited functions that it calls.

    Raises:
        TypeError: the path is no string.
        UnknownName: there is no module at that path.
        RewireError: that module was not edited.

    Example:
        >>> print(rewire.source(rewired, "blocks.0"))
        def forward(self, x: Tensor) -> Tensor:
            depth = self._depth.enter()
            x = depth.open(x, norm=self.ln_1)
            x = depth.add(x, self.attn(depth.apply(self.ln_1, x)), norm=self.ln_2)
            x = depth.add(x, self.mlp(depth.apply(self.ln_2, x)), last=True)
            return depth.leave(x)
        <BLANKLINE>
    """
    connections(model)
    check_type("path", path, str)
    try:
        module = model.get_submodule(path)
    except AttributeError:
        near = did_you_mean(path, (p for p, _ in model.named_modules()))
        raise UnknownName(f"{type(model).__name__} has no module '{path}'.{near}") from None
    if not any(_edits(module)):
        rewritten = [p or "(the model)" for p, m in model.named_modules() if is_edited(m) and is_opened(m)]
        near = f"; rewritten are {', '.join(rewritten[:5])}{', ...' if len(rewritten) > 5 else ''}" if rewritten else ""
        raise RewireError(f"the forward of '{path}' was not rewritten{near}.")
    return "\n".join(textwrap.dedent(text) for _, text in _edits(module))


@dataclasses.dataclass(frozen=True)
class _Rewritten:
    """A function with one of its edited sources, and the paths of the modules that run it."""

    text: Text
    source: str
    paths: list[str]

    @property
    def start(self) -> int:
        """Index of its first line in the file."""
        return self.text.first - 1

    @property
    def end(self) -> int:
        return self.start + len(lines_of(self.text.text))

    @property
    def modules(self) -> str:
        first = " ".join(self.paths[0].split()) or "(the model)"  # a name may hold a line break
        return f"{first} (and {len(self.paths) - 1} more)" if len(self.paths) > 1 else first


def _rewritten(model: nn.Module) -> Iterable[_Rewritten]:
    """All different edited sources of all functions, in the order of the modules."""
    found: dict[tuple[str, int, str], _Rewritten] = {}
    for path, module in model.named_modules():
        for original, source in _edits(module):
            text = text_of(original)
            found.setdefault((text.file, text.first, source), _Rewritten(text, source, [])).paths.append(path)
    return found.values()


def _edits(module: nn.Module) -> Iterator[tuple[FunctionType, str]]:
    """The original functions of which ``module`` runs edited ones, each with its edited source."""
    if is_edited(module):
        for edited in edits_of(module).values():
            original = edited.original(original_class(module)).function
            assert original is not None
            yield original, edited.source
    for gate in vars(module).values():
        if isinstance(gate, HelperGate):
            yield gate.original, gate.source


def _one_text_each(found: Sequence[_Rewritten]) -> list[list[_Rewritten]]:
    """The edited functions of a file in groups, none of which has one function twice."""
    sets: list[dict[int, _Rewritten]] = []
    for rewritten in found:
        free = next((chosen for chosen in sets if rewritten.start not in chosen), None)
        if free is None:
            sets.append(free := {})
        free[rewritten.start] = rewritten
    return [[chosen[start] for start in sorted(chosen)] for chosen in sets]


def _file_diff(file: str, chosen: Sequence[_Rewritten]) -> str:
    """The diff of one file in which the chosen functions are replaced by their edited sources."""
    linecache.checkcache(file)
    old = linecache.getlines(file)
    new = list(old)
    for rewritten in reversed(chosen):
        if "".join(old[rewritten.start : rewritten.end]) != rewritten.text.text:
            raise RewireError(f"{file} has changed since the model was rewired: import the model again.")
        new[rewritten.start : rewritten.end] = lines_of(rewritten.source)
    old, new = _as_stored(file, old), _as_stored(file, new)
    groups = difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes()
    name = _name(file)
    hunks = [line for group in groups for line in _hunk(group, old, new, chosen)]
    return "".join([f"--- a{name}\n", f"+++ b{name}\n", *hunks])


def _hunk(group: Sequence[Opcode], old: list[str], new: list[str], chosen: Sequence[_Rewritten]) -> Iterator[str]:
    """The lines of one hunk: differences with fewer than seven equal lines between them."""
    (_, start, _, new_start, _), (_, _, end, _, new_end) = group[0], group[-1]
    changed = [at for tag, at, *_ in group if tag != "equal"]
    owners = [next(r for r in reversed(chosen) if r.start <= at) for at in changed]
    modules = ", ".join(dict.fromkeys(owner.modules for owner in owners))
    yield f"@@ -{start + 1},{end - start} +{new_start + 1},{new_end - new_start} @@ {modules}\n"
    for tag, a, b, c, d in group:
        if tag == "equal":
            yield from (f" {line}" for line in old[a:b])
        else:
            yield from (f"-{line}" for line in old[a:b])
            yield from (f"+{line}" for line in new[c:d])


def _as_stored(file: str, lines: Sequence[str]) -> list[str]:
    """``lines`` with the line endings that the file has on disk, so that the diff applies to it."""
    path = Path(file)
    stored = path.read_bytes() if path.is_file() else b"\n"  # a notebook's cell is no file
    ended = [f"{line[:-1]}\r\n" for line in lines] if b"\r\n" in stored else list(lines)
    if not stored.endswith(b"\n"):
        ended[-1] = ended[-1].rstrip("\r\n") + "\n\\ No newline at end of file\n"
    return ended


def _name(file: str) -> str:
    """The path that follows ``a`` and ``b`` in a diff's first lines."""
    path = Path(file).absolute()
    if path.is_relative_to(Path.cwd()):
        path = Path("/") / path.relative_to(Path.cwd())
    elif "site-packages" in path.parts:
        path = Path("/", *path.parts[path.parts.index("site-packages") + 1 :])
    return path.as_posix() + "\t" * (" " in str(path))  # a tab marks the end of a name with blanks
