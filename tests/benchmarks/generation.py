"""`generate` on the digits against the same forward passes alone, in one process, medians of five.

    python tests/benchmarks/generation.py

The forward passes alone are the floor: equal batches, equal numbers of passes, nothing drawn,
scored or written. Prints one line; asserts nothing.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from rft_batch.generation import generate
from rft_batch.policies import load_policy
from rft_batch.settings import GenerateSettings

ROOT = Path(__file__).resolve().parent.parent.parent
NUM_PROMPTS, SAMPLES_PER_PROMPT, STEPS, BATCH_SIZE = 20, 16, 32, 32


def main() -> None:
    """Measures both, interleaved."""
    ours, floor = [], []
    seconds(forward_passes)
    for _ in range(5):
        floor.append(seconds(forward_passes))
        ours.append(seconds(generation))
    count = NUM_PROMPTS * SAMPLES_PER_PROMPT
    print(
        f"generate {count / statistics.median(ours):.1f} samples/s, "
        f"forward passes alone {count / statistics.median(floor):.1f}, "
        f"ratio {statistics.median(floor) / statistics.median(ours):.2f} "
        f"({torch.get_num_threads()} threads)"
    )


def generation() -> None:
    """The stage, from reading the prompts to the manifest's absence."""
    with tempfile.TemporaryDirectory() as folder:
        generate(
            GenerateSettings(
                round_dir=Path(folder) / "round-1",
                policy=ROOT / "data/digits/policy",
                prompts=ROOT / "data/digits/prompts.jsonl",
                reward=(f"{ROOT / 'pipelines/digits_reward.py'}:class_probability",),
                samples_per_prompt=SAMPLES_PER_PROMPT,
                prompts_per_shard=10,
                limit=NUM_PROMPTS,
                steps=STEPS,
                batch_size=BATCH_SIZE,
            )
        )


@torch.inference_mode()
def forward_passes() -> None:
    """As many forward passes of the policy over as many rows."""
    model = load_policy(ROOT / "data/digits/policy").model
    x = torch.full((BATCH_SIZE, 64), 17)
    labels = torch.zeros(BATCH_SIZE, dtype=torch.int64)
    for _ in range(NUM_PROMPTS * SAMPLES_PER_PROMPT // BATCH_SIZE * STEPS):
        model(x, labels)


def seconds(function: Callable[[], None]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
