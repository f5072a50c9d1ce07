"""What the documentation site has besides the pages in docs/.

The reference of the code, and the pages of the repository's root.

A hook of MkDocs; `mkdocs.yml` names it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import paceline
import paceline_lab
import paceline_server
from paceline.cli import commands

ROOT = Path(__file__).parent.parent
ROOT_PAGES = {
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the repository's root, their links turned to where things are on the site."""
    for name, place in ROOT_PAGES.items():
        files.append(File.generated(config, place, content=relinked((ROOT / name).read_text())))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Write the reference of the public names and of the commands where their pages say so."""
    if "<!-- every public name -->" in markdown:
        packages = (paceline, paceline_lab, paceline_server)
        names = [f"::: {package.__name__}.{name}" for package in packages for name in package.__all__]
        markdown = markdown.replace("<!-- every public name -->", "\n\n".join(names))
    return markdown.replace("<!-- every command -->", "\n".join(map(described, commands().values())))


def relinked(text: str) -> str:
    """Links of a page of the root, as a page of the site has them.

    A file that is not on the site is named without a link.
    """
    text = text.replace("](docs/", "](")
    for name, place in ROOT_PAGES.items():
        text = text.replace(f"]({name}", f"]({place}")
    return re.sub(r"\[([^\]]+)\]\(LICENSE\)", r"\1", text)


def described(command: Any) -> str:
    """One command: what it does, how it is called, an example, its arguments and options."""
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    usage = " ".join(["paceline", command.name, *(p.metavar or p.name.upper() for p in arguments), "[OPTIONS]"])
    lines = [f"## `paceline {command.name}`", "", command.help, "", "```text", usage, "```", ""]
    lines += ["Example:", "", "```sh", command.epilog.removeprefix("Example: "), "```", ""]
    lines += ["| argument or option | default | meaning |", "|---|---|---|"]
    lines += [f"| `{p.metavar}` | required | {_cell(p.help)} |" for p in arguments]
    return "\n".join([*lines, *map(_row, options), "", ""])


def _row(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    default = option.show_default if isinstance(option.show_default, str) else option.default
    shown = (
        {True: "on", False: "off", None: ""}.get(default, f"`{default}`")
        if isinstance(default, bool | None)
        else str(default)
    )
    return f"| {names} | {_cell(shown)} | {_cell(option.help or '')} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
