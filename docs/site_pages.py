"""What the documentation site has besides the pages in docs/.

The reference of the code, and the pages of the repository's root.

A hook of MkDocs; `mkdocs.yml` names it.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import paceline
import paceline_lab
import paceline_server
from paceline.cli import commands
from paceline.cluster.catalogue import CATALOGUE, HOP, Accelerator
from paceline.job.known import models
from paceline.planning.model.known import IMAGE_MODELS

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
    """Replace each marker of a page by what it stands for."""
    for marker, write in GENERATED.items():
        if marker in markdown:
            markdown = markdown.replace(marker, write())
    return markdown


def every_public_name() -> str:
    """The public names, for mkdocstrings: of each package the functions, then the classes, then the errors."""
    kinds: dict[str, list[str]] = {"Functions": [], "Classes": [], "Errors": []}
    for name in paceline.__all__:
        thing = getattr(paceline, name)
        is_class = isinstance(thing, type)
        kind = "Errors" if is_class and issubclass(thing, Exception) else "Classes" if is_class else "Functions"
        kinds[kind].append(f"::: paceline.{name}")
    for heading, package in {"Benchmarks": paceline_lab, "Remote modules": paceline_server}.items():
        kinds[heading] = [f"::: {package.__name__}.{name}" for name in package.__all__]
    return "\n\n".join("\n\n".join([f"## {heading}", *names]) for heading, names in kinds.items())


def relinked(text: str) -> str:
    """Links of a page of the root, as a page of the site has them.

    A file that is not on the site is named without a link.
    """
    text = text.replace("](docs/", "](")
    for name, place in ROOT_PAGES.items():
        text = text.replace(f"]({name}", f"]({place}")
    return re.sub(r"\[([^\]]+)\]\(LICENSE\)", r"\1", text)


def every_command() -> str:
    """Return all commands, each followed by the commands below it."""
    return "\n".join(described(f"paceline {name}", command) for name, command in commands().items())


def described(name: str, command: Any) -> str:
    """Return the text of one command and of those below it: usage, example, arguments and options."""
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    below = vars(command).get("commands", {})
    lines = [f"## `{name}`", "", command.help, ""]
    if arguments or options or not below:  # not only a group of other commands
        usage = " ".join([name, *(p.metavar or p.name.upper() for p in arguments), "[OPTIONS]"])
        lines += ["```text", usage, "```", ""]
    if command.epilog:
        lines += ["Example:", "", "```sh", command.epilog.removeprefix("Example: "), "```", ""]
    if arguments or options:
        lines += ["| argument or option | default | meaning |", "|---|---|---|"]
        lines += [f"| `{p.metavar or p.name.upper()}` | required | {_cell(p.help or '')} |" for p in arguments]
        lines += [*map(_row, options), ""]
    return "\n".join([*lines, *(described(f"{name} {each}", one) for each, one in below.items())])


def every_error() -> str:
    """Return all errors by area and code, with their classes and texts."""
    lines, area = [], ""
    for entry in re.split(r"\n(?=\S)", (ROOT / "tests" / "messages.txt").read_text().strip()):
        head, *texts = entry.split("\n")
        code, kinds = head.split("  ", 1)
        if code.partition(".")[0] != area:
            area = code.partition(".")[0]
            lines += ["", f"### {area}", "", "| code | class | text |", "|---|---|---|"]
        text = " ".join(text.strip() for text in texts).replace("{{", "{").replace("}}", "}")
        lines.append(f'| <span id="{code}">`{code}`</span> | {kinds} | {_cell(html.escape(text, quote=False))} |')
    return "\n".join(lines)


def devices() -> str:
    """Return the catalogue of hardware as a table."""
    precisions = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8")
    of_device = ["name", "generation", *precisions, "sustained", "power, W", "memory, GiB", "its GB/s"]
    of_links = ["in a host, GB/s", "between hosts, Gbit/s", "host memory, GiB", "to it, GB/s", "sources"]
    return table([*of_device, *of_links], [_device(device, precisions) for device in CATALOGUE.values()])


def known_models() -> str:
    """Return the models with published dimensions as a table by family."""
    rows = []
    for family in sorted({model.family for model in models()}):
        own = [model for model in models() if model.family == family]
        sources = dict.fromkeys(part for model in own for part in model.source.split("; "))
        rows.append((family, ", ".join(f"`{model.name}`" for model in own), "; ".join(sources)))
    return table(("family", "names", "dimensions from"), rows)


def known_image_models() -> str:
    """Return the image models with known shapes as a table by source."""
    sources = dict.fromkeys(model.source for model in IMAGE_MODELS)
    rows = [(", ".join(f"`{m.name}`" for m in IMAGE_MODELS if m.source == source), source) for source in sources]
    return table(("names", "shapes from"), rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


GENERATED: dict[str, Callable[[], str]] = {
    "<!-- every public name -->": every_public_name,
    "<!-- every command -->": every_command,
    "<!-- every device -->": devices,
    "<!-- every known model -->": known_models,
    "<!-- every error -->": every_error,
    "<!-- every known image model -->": known_image_models,
}


def _device(device: Accelerator, precisions: Sequence[str]) -> list[str]:
    peaks = [f"{device.peak_flops[p] / 1e12:.5g}" if p in device.peak_flops else "" for p in precisions]
    link = device.inside
    inside = f"{link.bandwidth / 1e9:g}, {link.name}, {link.latency_s * 1e6:g} µs, {device.per_host} devices"
    inside += f", {device.machine} to a machine" if device.machine else ""
    inside += f", a torus of {device.torus} dimensions" if device.torus else ""
    sources = "; ".join(
        text if key == "all" else f"{key}: {text.removeprefix(f'{key}: ')}"
        for key, text in device.sources.items()
        if text != HOP
    )
    return [
        device.name,
        device.generation,
        *peaks,
        f"{device.sustained:.2g}",
        "" if device.power_w is None else f"{device.power_w:g}",
        f"{device.memory_bytes / 2**30:g}",
        f"{device.memory_bandwidth / 1e9:g}",
        inside,
        f"{device.network.bandwidth * 8 / 1e9:g}, {device.network.latency_s * 1e6:g} µs",
        f"{device.host_memory_bytes / 2**30:g}",
        f"{device.host_link.bandwidth / 1e9:g}, {device.host_link.name}",
        sources,
    ]


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
