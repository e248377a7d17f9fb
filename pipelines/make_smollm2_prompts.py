"""Makes `data/smollm2`: sums as chat prompts.

python pipelines/make_smollm2_prompts.py
"""

import json
import random
from pathlib import Path

import click

SEED = 0
LARGEST = 30
FOLDER = Path(__file__).resolve().parent.parent / "data" / "smollm2"
QUESTION = "What is {} + {}? Answer with the number only."


@click.command(help=__doc__)
def main() -> None:
    """Writes 96 prompts to train on, and 64 others for evaluation alone."""
    draw = random.Random(SEED)
    # Larger numbers leave the base model with hardly a right answer to select. Each pair stands
    # once, in either order, so that no held-out sum is a training sum turned round.
    pairs = [(a, b) for a in range(1, LARGEST + 1) for b in range(a, LARGEST + 1)]
    chosen = [tuple(draw.sample(pair, 2)) for pair in draw.sample(pairs, 96 + 64)]
    FOLDER.mkdir(parents=True, exist_ok=True)
    write_prompts(FOLDER / "prompts.jsonl", "train", chosen[:96])
    write_prompts(FOLDER / "held_out.jsonl", "held-out", chosen[96:])


def write_prompts(path: Path, prefix: str, pairs: list[tuple[int, ...]]) -> None:
    """One row per sum: its id, the chat, and the right answer for the reward."""
    rows = [
        {
            "prompt_id": f"{prefix}-{i:03}",
            "prompt": [{"role": "user", "content": QUESTION.format(a, b)}],
            "answer": str(a + b),
        }
        for i, (a, b) in enumerate(pairs)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
