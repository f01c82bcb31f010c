"""What the site has besides the pages of docs/: the reference, made from docstrings and from the command line.

MkDocs calls `on_files` and `on_page_markdown`, for mkdocs.yml names this module. Nothing generated is committed.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PARTS = ("plan", "formats", "files", "packed", "rounding", "searching", "streaming", "fp8", "trees", "report")
ROOT_PAGES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
ITEM = re.compile(r"^(\S(?:[\w*., =\"'`()\[\]-]*?\S)?) {2,}(?=\S)", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def generated_pages() -> dict[str, str]:
    """The pages that are made at build time, by their path in the site."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    pages = {name: (ROOT / source).read_text() for name, source in ROOT_PAGES.items()}
    return {**pages, "reference/command-line.md": command_line_page(), "reference/python.md": python_page()}


# ---- the command line ------------------------------------------------------------------------------------------------


def command_line_page() -> str:
    """Every verb with its help, arguments and options, as `--help` has them."""
    import typer.main

    from bitplan.cli.app import app

    lines = ["# Command line", "", "Made from the program's own help: `bitplan VERB --help` prints the same.", ""]
    for name, command in _verbs(typer.main.get_command(app)):
        lines += [f"## bitplan {name}", "", _help(command.help or ""), "", f"    {_usage(name, command)}", ""]
        rows = [(_spelling(one), _describe(one)) for one in command.params if one.name != "help"]
        rows = [(name, text) for name, text in rows if name]
        if rows:
            lines += ["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows), ""]
    return "\n".join(lines)


def _verbs(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from _verbs(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def _usage(name: str, command: Any) -> str:
    names = [(one.metavar or one.name or "").upper() for one in command.params if one.param_type_name == "argument"]
    return " ".join(["bitplan", name, *names, "[OPTIONS]"])


def _spelling(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{(parameter.metavar or parameter.name).upper()}`"
    return "" if getattr(parameter, "hidden", False) else ", ".join(f"`{one}`" for one in parameter.opts)


def _describe(parameter: Any) -> str:
    text = _help(getattr(parameter, "help", None) or "").replace("\n", " ")
    default = parameter.default
    if isinstance(default, str | int | float) and not isinstance(default, bool) and default != "":
        text += f" Default: `{default}`."
    return text.replace("|", "\\|")


def _help(text: str) -> str:
    """Help as Markdown: angle brackets are text, and the example is a line of code."""
    text = inspect.cleandoc(text.replace("\b", "")).replace("<", "&lt;")
    return re.sub(r"^ *(?:Example: )(bitplan .*)$", r"Example: `\1`", text, flags=re.MULTILINE)


# ---- Python ----------------------------------------------------------------------------------------------------------


def python_page() -> str:
    """Every public name with its signature and docstring, part by part."""
    lines = [
        "# Python",
        "",
        "Every public name, from the docstrings. Names under `bitplan` need no further import.",
        "",
    ]
    for part in ("", *PARTS):
        module = importlib.import_module(f"bitplan.{part}".rstrip("."))
        lines += [f"## {module.__name__}", "", _first_paragraph(module), ""]
        for name in sorted(module.__all__, key=str.lower):
            lines += _describe_name(module.__name__, name, getattr(module, name))
    return "\n".join(lines)


def _describe_name(module: str, name: str, thing: Any) -> list[str]:
    if name.startswith("__") or inspect.ismodule(thing):
        return []
    lines = [f"### {name} {{ #{module}.{name} }}", ""]
    if callable(thing):
        lines += ["```py", f"{name}{_signature(thing)}", "```", ""]
        lines += [_docstring(thing), ""]
    else:
        lines += [f"A constant of {module}.", ""]
    if inspect.isclass(thing):
        for method, body in vars(thing).items():
            if not method.startswith("_") and inspect.getdoc(body) and (inspect.isfunction(body) or _is_wrapped(body)):
                function = body.__func__ if isinstance(body, classmethod | staticmethod) else body
                shown = f"{method}{_signature(function, wide=True)}" if callable(function) else method
                lines += [f"**`{name}.{shown}`**", "", _docstring(function), ""]
    return lines


def _is_wrapped(body: Any) -> bool:
    return isinstance(body, property | classmethod | staticmethod)


def _signature(thing: Any, *, wide: bool = False) -> str:
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return "(...)"
    shown = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    text = str(signature.replace(parameters=shown, return_annotation=inspect.Signature.empty))
    text = re.sub(r"<(?:function |object |class ')?([\w.]+)[^>]*>", r"\1", text)
    if len(text) < 70 or wide:
        return text
    arguments = re.split(r", (?=[\w*])(?![^(\[{]*[)\]}].)", text[1:-1])
    return "(\n    " + ",\n    ".join(arguments) + ",\n)"


def _docstring(thing: Any) -> str:
    return _as_markdown(inspect.getdoc(thing) or "")


def _first_paragraph(module: Any) -> str:
    return _as_markdown(inspect.cleandoc(module.__doc__ or "").split("\n\n")[0])


def _as_markdown(text: str) -> str:
    """A docstring's text: lines of a name, spaces and what it is become a list, what is indented stays code."""
    return "\n\n".join(map(_paragraph, re.split(r"\n\s*\n", text)))


def _paragraph(text: str) -> str:
    if text.startswith("    "):
        return text
    text = text.replace("<", "&lt;")
    if not ITEM.match(text):
        return text
    lines = []
    for line in text.splitlines():
        name = ITEM.match(line)
        lines.append(f"- `{name[1]}`: {line[name.end() :].strip()}" if name else f"  {line.strip()}")
    return "\n".join(lines)


# ---- MkDocs' events --------------------------------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    for path, text in generated_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links to files of the repository lead to its address where there is one, else they are plain text."""
    here = (ROOT / "docs" / page.file.src_uri).parent
    if page.file.src_uri in ROOT_PAGES:
        here = ROOT
    return "".join(
        text if text.startswith("```") else LINK.sub(lambda link: _resolve(link, here, page, config, files), text)
        for text in _split_code(markdown)
    )


def _split_code(markdown: str) -> Iterator[str]:
    end = 0
    for block in FENCE.finditer(markdown):
        yield markdown[end : block.start()]
        yield block[0]
        end = block.end()
    yield markdown[end:]


def _resolve(link: re.Match[str], here: Path, page: Any, config: Any, files: Any) -> str:
    text, target = link[1], link[2]
    path, _, anchor = target.partition("#")
    if "://" in target or not path:
        return link[0]
    full = (here / path).resolve()
    if full.is_relative_to(ROOT / "docs") and here != ROOT:
        return link[0]
    pages = {ROOT / source: name for name, source in ROOT_PAGES.items()}
    name = pages.get(full) or (str(full.relative_to(ROOT / "docs")) if full.is_relative_to(ROOT / "docs") else None)
    if name and files.get_file_from_path(name):
        depth = "../" * page.file.src_uri.count("/")
        return f"[{text}]({depth}{name}{'#' + anchor if anchor else ''})"
    if config.repo_url and full.is_relative_to(ROOT):
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{full.relative_to(ROOT)})"
    return text
