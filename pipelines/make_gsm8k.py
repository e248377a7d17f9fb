"""Downloads the word problems of GSM8K and writes them as chat prompts.

    python pipelines/make_gsm8k.py

Needs the network once. Trains on the 7,473 problems of its training part; the 1,319 of its test
part are for evaluation alone.
"""

import json
from pathlib import Path
from typing import Any

import click

FOLDER = Path(__file__).resolve().parent.parent / "runs" / "gsm8k-prompts"
INSTRUCTION = (
    "Solve the problem step by step. Write every calculation as <<expression=result>>, "
    "such as <<3*4=12>>, and end with a line that holds #### and the final number."
)


@click.command(help=__doc__)
@click.argument("folder", default=FOLDER, type=click.Path(file_okay=False, path_type=Path))
def main(folder: Path) -> None:
    """Writes the files, the held-out one last."""
    folder.mkdir(parents=True, exist_ok=True)
    train = problems("train")
    # The paper trains on the written solutions too.
    solved = [{**row, "completion": row["answer"]} for row in train]
    parts = {"prompts": train, "anchor": solved, "held_out": problems("test")}
    for name, rows in parts.items():
        path = folder / f"{name}.jsonl"
        unfinished = path.with_name(path.name + ".tmp")
        unfinished.write_text("".join(json.dumps(row) + "\n" for row in rows))
        unfinished.replace(path)
        print(f"{path}: {len(rows)} prompts")


def problems(part: str) -> list[dict[str, Any]]:
    """The problems of a part, as rows of a prompt file.

    Raises:
        ClickException: they could not be downloaded.
    """
    # Late, so that --help is quick.
    from datasets import load_dataset

    try:
        rows = load_dataset("openai/gsm8k", "main", split=part)
    except Exception as error:  # the hub's client has its own errors for each way to be offline
        raise click.ClickException(
            f"openai/gsm8k, part {part}: not downloaded, {type(error).__name__}. "
            "Run this once where huggingface.co can be reached, then copy the folder here."
        ) from error
    return [prompt_row(f"{part}-{i:04}", **row) for i, row in enumerate(rows)]


def prompt_row(prompt_id: str, question: str, answer: str) -> dict[str, Any]:
    """A problem as a chat, with its written solution for the reward."""
    messages = [
        {"role": "system", "content": INSTRUCTION},
        {"role": "user", "content": question},
    ]
    return {"prompt_id": prompt_id, "prompt": messages, "answer": answer}


if __name__ == "__main__":
    main()
