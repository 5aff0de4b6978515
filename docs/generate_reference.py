"""Writes `docs/reference.md`: every public name with its signature and what its docstring says.

    python docs/generate_reference.py            writes the page
    python docs/generate_reference.py --check    exits with 1 if the page is out of date

Reads the sources and imports nothing, so the page is the same on every Python and needs no torch. A module's public
names are its `__all__`; a package's are what its `__init__` re-exports as `X as X`.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

__all__ = ["PAGE", "reference"]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference.md"
SOURCES = {"rollnest": ROOT / "engine", "rollnest_adapters": ROOT / "adapters"}
MODULES = [
    "rollnest",
    "rollnest.abc",
    "rollnest.errors",
    "rollnest.advantages",
    "rollnest.filters",
    "rollnest.hosting",
    "rollnest.testing",
    "rollnest.testing.strategies",
    "rollnest.testing.servers",
    "rollnest_adapters.transformers",
    "rollnest_adapters.vllm",
    "rollnest_adapters.sglang",
    "rollnest_adapters.lmdeploy",
    "rollnest_adapters.llamacpp",
    "rollnest_adapters.pool",
    "rollnest_adapters.judgers",
    "rollnest_adapters.ray",
    "rollnest_adapters.tokenizer",
    "rollnest_adapters.torch",
    "rollnest_adapters.bench",
    "rollnest_adapters.cli",
]
HANDED_OUT = {
    "BlockingEngine",
    "BlockingPause",
    "Context",
    "Pause",
    "Policy",
    "RayStream",
    "Rollout",
}
"""Classes that the engine makes and users only receive; how they are made is nobody's business."""

WIDTH = 100

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Definition: TypeAlias = "Function | ast.ClassDef | ast.Assign | ast.AnnAssign"


class Name(NamedTuple):
    """A public name: where it is defined, and as what."""

    name: str
    module: str
    node: Definition
    docstring: str


def reference() -> str:
    """Returns the page."""
    parts = [
        "# Reference",
        "Every public name. Written by `python docs/generate_reference.py` from signatures and docstrings; a test "
        "fails when it is out of date, so change the code and run the script. What begins with an underscore is "
        "private.",
        _index(),
    ]
    defined: dict[tuple[str, str], str] = {}  # where a name is described already
    for module in MODULES:
        parts.append(f"## {module}")
        docstring = ast.get_docstring(_tree(module)) or ""
        parts.append(_prose(docstring.partition("\nInvariants:\n")[0]))
        elsewhere: list[str] = []
        for name in _public(module):
            key = (name.module, name.name)
            if key in defined:
                elsewhere.append(f"`{name.name}` (see `{defined[key]}`)")
                continue
            defined[key] = module
            parts += _describe(name)
        if elsewhere:
            parts.append("Also here: " + ", ".join(elsewhere) + ".")
    return "\n\n".join(part for part in parts if part) + "\n"


# Finding names


def _path(module: str) -> Path:
    path = SOURCES[module.split(".")[0]].joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


_trees: dict[str, ast.Module] = {}


def _tree(module: str) -> ast.Module:
    if module not in _trees:
        _trees[module] = ast.parse(_path(module).read_text(encoding="utf-8"))
    return _trees[module]


def _public(module: str) -> Iterator[Name]:
    exported = _exported(module)
    imported = _imports(module)
    for name in exported if exported is not None else imported:
        yield _resolve(module, name)


def _exported(module: str) -> list[str] | None:
    for node in _tree(module).body:
        if isinstance(node, ast.Assign) and _targets(node) == ["__all__"]:
            names: list[str] = ast.literal_eval(node.value)
            return names
    return None


def _imports(module: str) -> dict[str, str]:
    """Names that a module re-exports as `X as X`, and the modules they come from."""
    found: dict[str, str] = {}
    package = module if _path(module).name == "__init__.py" else module.rpartition(".")[0]
    body = _tree(module).body
    # What is imported when it is asked for stands in a block for type checkers.
    later = [n for n in body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    for node in [*body, *[inner for block in later for inner in block.body]]:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            source = ".".join([*base, *([node.module] if node.module else [])])
            found |= {alias.name: source for alias in node.names if alias.asname == alias.name}
    return found


def _resolve(module: str, name: str) -> Name:
    body = _tree(module).body
    for at, node in enumerate(body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name == name and not _decorated(node, "overload"):
                return Name(name, module, node, ast.get_docstring(node) or "")
        elif isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
            return Name(name, module, node, _string(body[at + 1 : at + 2]))
    source = _imports(module).get(name)
    if source is None:
        raise LookupError(f"{module} has no {name!r}")
    return _resolve(source, name)


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _string(nodes: Sequence[ast.stmt]) -> str:
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return inspect.cleandoc(str(node.value.value))
    return ""


def _decorated(node: Function | ast.ClassDef, name: str) -> bool:
    return any(
        ast.unparse(decorator).split("(")[0].split(".")[-1] == name
        for decorator in node.decorator_list
    )


# Writing them down


def _index() -> str:
    lines: list[str] = []
    for module in MODULES:
        names = ", ".join(f"[{n.name}](#{n.name.lower()})" for n in _public(module))
        lines.append(f"- [{module}](#{module.replace('.', '')}): {names}")
    return "\n".join(lines)


def _describe(name: Name) -> Iterator[str]:
    yield f"### {name.name}"
    match name.node:
        case ast.ClassDef() as node:
            yield _fenced(_class_signature(node))
            yield _prose(name.docstring)
            methods = "\n".join(_members(node))
            yield methods and f"**Methods and properties**\n\n{methods}"
        case ast.FunctionDef() | ast.AsyncFunctionDef() as node:
            yield _fenced(_function_signature(node))
            yield _prose(name.docstring)
        case ast.Assign() | ast.AnnAssign() as node:
            yield _fenced(_constant(node))
            yield _prose(name.docstring)


def _fenced(code: str) -> str:
    return f"```text\n{code}\n```"


def _constant(node: ast.Assign | ast.AnnAssign) -> str:
    value = node.value
    if isinstance(value, ast.Constant) and _is_alias(node):
        return f"{_targets(node)[0]} = {value.value!s}"
    return f"{_targets(node)[0]} = {'...' if value is None else ast.unparse(value)}"


def _is_alias(node: ast.Assign | ast.AnnAssign) -> bool:
    return isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).endswith("TypeAlias")


def _class_signature(node: ast.ClassDef) -> str:
    bases = [base for base in map(ast.unparse, node.bases) if base not in ("ABC", "Protocol")]
    head = node.name
    if "Protocol" in map(ast.unparse, node.bases):
        head = f"protocol {head}"
    elif any("Enum" in base for base in bases):
        return "\n".join([f"enum {head}", *(f"    {line}" for line in _enum_members(node))])
    constructor = next(
        (m for m in node.body if isinstance(m, ast.FunctionDef) and m.name == "__init__"), None
    )
    if node.name in HANDED_OUT:
        parameters = None
    elif constructor is not None:
        parameters = _parameters(constructor.args, skip_self=True)
    elif _decorated(node, "frozen"):
        parameters = _fields(node)
    else:
        parameters = None
    text = head if parameters is None else _laid_out(head, parameters, "")
    return text + (f"    # inherits {', '.join(bases)}" if bases else "")


def _enum_members(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(member) for member in node.body if isinstance(member, ast.Assign)]


def _fields(node: ast.ClassDef) -> list[str]:
    """The constructor's parameters of an attrs class."""
    keyword_only = any(
        isinstance(decorator, ast.Call)
        and any(k.arg == "kw_only" and ast.unparse(k.value) == "True" for k in decorator.keywords)
        for decorator in node.decorator_list
    )
    parameters: list[str] = ["*"] if keyword_only else []
    for member in node.body:
        if not isinstance(member, ast.AnnAssign) or "ClassVar" in ast.unparse(member.annotation):
            continue
        options = _field_options(member.value)
        if options.get("init") == "False":
            continue
        if options.get("kw_only") == "True" and "*" not in parameters:
            parameters.append("*")
        name = ast.literal_eval(options["alias"]) if "alias" in options else _targets(member)[0]
        text = f"{name}: {_unquoted(member.annotation)}"
        parameters.append(text + (f" = {options['default']}" if "default" in options else ""))
    return parameters


def _field_options(value: ast.expr | None) -> dict[str, str]:
    if value is None:
        return {}
    if not (isinstance(value, ast.Call) and ast.unparse(value.func) == "field"):
        return {"default": ast.unparse(value)}
    options = {str(k.arg): ast.unparse(k.value) for k in value.keywords}
    factory = options.get("factory") or options.get("default", "").removeprefix("Factory(")[:-1]
    if "factory" in options or options.get("default", "").startswith("Factory("):
        made = re.sub(r"\[.*\]", "", factory)
        options["default"] = {"dict": "{}", "list": "[]"}.get(made, f"{made}()")
    return options


def _unquoted(annotation: ast.expr) -> str:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value
    return ast.unparse(annotation)


def _members(node: ast.ClassDef) -> Iterator[str]:
    for member in node.body:
        if not isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if member.name.startswith("_") and member.name not in ("__aenter__", "__aexit__"):
            continue
        if _decorated(member, "setter") or _decorated(member, "overload"):
            continue
        docstring = ast.get_docstring(member) or ""
        if _decorated(member, "property") or _decorated(member, "cached_property"):
            returns = "" if member.returns is None else f": {_unquoted(member.returns)}"
            signature = f"{member.name}{returns}"
        else:
            skip_self = not _decorated(member, "staticmethod")
            signature = _function_signature(member, skip_self=skip_self, one_line=True)
        text = _indented(_prose(docstring), "  ")
        yield f"- `{signature}`" + (f"  \n{text}" if text else "")


def _function_signature(node: Function, *, skip_self: bool = False, one_line: bool = False) -> str:
    composite = _decorated(node, "composite")  # Hypothesis fills in `draw`
    parameters = _parameters(node.args, skip_self=skip_self or composite)
    returns = "" if node.returns is None else f" -> {_unquoted(node.returns)}"
    if composite:
        returns = returns.replace("-> ", "-> SearchStrategy[") + "]"
    head = f"async {node.name}" if isinstance(node, ast.AsyncFunctionDef) else node.name
    if one_line:
        return f"{head}({', '.join(parameters)}){returns}"
    return _laid_out(head, parameters, returns)


def _laid_out(head: str, parameters: Sequence[str], tail: str) -> str:
    line = f"{head}({', '.join(parameters)}){tail}"
    if len(line) <= WIDTH:
        return line
    inside = "".join(f"    {parameter},\n" for parameter in parameters)
    return f"{head}(\n{inside}){tail}"


def _parameters(arguments: ast.arguments, *, skip_self: bool) -> list[str]:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    defaults += arguments.defaults
    parts: list[str] = []
    for at, (argument, default) in enumerate(zip(positional, defaults, strict=True), 1):
        parts.append(_parameter(argument, default))
        if at == len(arguments.posonlyargs):
            parts.append("/")
    if skip_self:
        parts = [part for part in parts[1:] if part != "/"]
    if arguments.vararg is not None:
        parts.append("*" + _parameter(arguments.vararg, None))
    elif arguments.kwonlyargs:
        parts.append("*")
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parts.append(_parameter(argument, default))
    if arguments.kwarg is not None:
        parts.append("**" + _parameter(arguments.kwarg, None))
    return parts


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    text = argument.arg
    if argument.annotation is not None:
        text += f": {_unquoted(argument.annotation)}"
    return text if default is None else f"{text} = {ast.unparse(default)}"


# Docstrings, in Google form, as Markdown

_SECTION = re.compile(r"(Args|Attributes|Cancellation|Raises|Returns|Warns|Yields):(?: (.*))?")
_HYPOTHESIS = "    draw: Hypothesis gives it.\n"
_ITEM = re.compile(r"(\w[\w.]*): (.*)")


def _prose(docstring: str) -> str:
    """A docstring as Markdown: paragraphs as they are, sections as lists."""
    blocks: list[str] = []
    section = ""
    indented = False  # whether the section's text stands below its title
    paragraph: list[str] = []
    for line in [*docstring.replace(_HYPOTHESIS, "").splitlines(), ""]:
        title = _SECTION.fullmatch(line)
        if title is not None:
            blocks += _closed(paragraph, section)
            section, indented = title[1], title[2] is None
            paragraph = [] if indented else [title[2]]
        elif not line:
            blocks += _closed(paragraph, section)
            paragraph = []
            section = section if indented else ""
        else:
            if section and indented and not line.startswith("    "):  # the section is over
                blocks += _closed(paragraph, section)
                section, paragraph = "", []
            paragraph.append(line)
    return "\n\n".join(blocks)


def _closed(paragraph: Sequence[str], section: str) -> Iterator[str]:
    if not paragraph:
        return
    if section in ("Args", "Attributes", "Raises", "Warns"):
        title = {"Args": "Arguments"}.get(section, section)
        yield f"{title}:\n\n" + "\n".join(_items(paragraph))
    elif section:
        yield f"{section}: " + " ".join(line.strip() for line in paragraph)
    elif paragraph[0].startswith("    "):
        yield _fenced(inspect.cleandoc("\n".join(["", *paragraph])))
    else:
        yield "\n".join(paragraph)


def _items(lines: Iterable[str]) -> list[str]:
    items: list[str] = []
    for line in lines:
        match = _ITEM.fullmatch(line[4:])
        if match:
            items.append(f"- `{match[1]}`: {match[2]}")
        elif items:
            items[-1] += f" {line.strip()}"
    return items


def _indented(text: str, by: str) -> str:
    return "\n".join(by + line if line else "" for line in text.splitlines())


def _main() -> int:
    page = reference()
    if "--check" in sys.argv[1:]:
        current = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
        if current != page:
            sys.stderr.write(f"{PAGE} is out of date: python docs/generate_reference.py\n")
            return 1
        return 0
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
