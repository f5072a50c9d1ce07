"""`paceline generate RUN "prompt"`"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.command import Checkpoint
from paceline.cli.evaluate import run_with_checkpoint


def command(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Directory or URL of a run, or an exported Hugging Face folder.")
    ],
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT...", help="Prompts; without any, each line of stdin is one.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Treat a prompt as a user's message, with the tokenizer's chat template.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Largest number of tokens to generate.")] = 128,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="Sample tokens with this temperature.", show_default="greedy decoding"),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Sample from the most likely tokens with this total probability."),
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from this number of most likely tokens.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed for sampling tokens.")] = 0,
    checkpoint: Checkpoint = "newest",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per prompt.")] = False,
) -> None:
    """Continue prompts with the language model of a run.

    The whole model runs on one device, regardless of the run's plan.
    """
    from paceline.run.generation import Sampling, TextModel
    from paceline.text import printable

    if temperature is None and (top_p is not None or top_k is not None):
        temperature = 1.0
    sampling = Sampling(max_new_tokens, temperature or None, top_p or None, top_k, seed)
    given = prompts or [line for line in sys.stdin.read().splitlines() if line.strip()]
    folder = Path(run)
    if (folder / "config.json").is_file() and not (folder / "job.yaml").exists():
        model = TextModel.of_folder(folder)
    else:
        with run_with_checkpoint(run, checkpoint) as record:
            model = TextModel.of_run(record, checkpoint)
    for prompt in given:
        form = model.form
        tokens = form.encode_chat([{"role": "user", "content": prompt}]) if chat else form.encode(prompt)
        if as_json:
            typer.echo(json.dumps({"prompt": prompt, "text": model.write(tokens, sampling)}))
            continue
        if len(given) > 1:
            typer.echo(f"> {printable(prompt)}")
        model.write(tokens, sampling, lambda part: typer.echo(printable(part), nl=False))
        typer.echo()
