"""Language-model generation against plain transformers, interleaved in one process.

    python tests/benchmarks/language_models.py runs/models/smollm2 [--prompts 64] [--flips]

64 chat prompts of mixed length, K=8, temperature 1. The peer is what people write by hand: batches
of prompts in their order, padded on the left, through `model.generate(num_return_sequences=K)`,
with as many sequences at once as ours has. The prompts are cut into parts; each part is timed with
both, one after the other, and the ratio is that of the tokens per second, median over the parts.
Tokens count up to and with the end of each completion. Prints, asserts nothing.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from rft_batch.policies import lm_engine
from rft_batch.policies.causal_lm import CausalLMPolicy
from rft_batch.policies.lm_sampling import Sampling
from rft_batch.randomness import SampleNoise

SAMPLES_PER_PROMPT, MAX_NEW_TOKENS, ROWS = 8, 64, 32
QUESTIONS = (
    "What is {a} + {b}? Answer with the number only.",
    "Name one animal.",
    "List {b} colours.",
    "Write one sentence about the number {a}.",
    "A farmer has {a} hens. Each hen lays {b} eggs in a week, and on Sunday he sells them all on "
    "the market of the next town, but for three that he eats. How many eggs does he sell?",
    "Explain in one or two sentences, for a child of {b} years, why the sky is blue at noon and "
    "red in the evening, and why the grass is green.",
)


def main() -> None:
    """Measures both on every part, then shows where our time goes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--parts", type=int, default=5)
    parser.add_argument("--flips", action="store_true", help="compare two batch sizes instead")
    given = parser.parse_args()
    policy = CausalLMPolicy(given.model)
    prompts = [policy.encode_prompt(chat) for chat in chats(given.prompts)]
    print(f"{len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens")
    if given.flips:
        show_flips(policy, prompts)
        return
    seconds_in = watch_engine()
    ratios, ours_rates, peer_rates = [], [], []
    for part in range(given.parts):
        own = prompts[part :: given.parts]
        peer = rate(lambda own=own: plain_generate(policy, own))
        ours = rate(lambda own=own: sum(map(len, our_ids(policy, own, ROWS))))
        ratios.append(ours / peer)
        ours_rates.append(ours)
        peer_rates.append(peer)
        print(f"part {part}: ours {ours:.1f} tokens/s, plain {peer:.1f}, ratio {ours / peer:.2f}")
    print(
        f"ours {statistics.median(ours_rates):.1f} tokens/s, plain transformers "
        f"{statistics.median(peer_rates):.1f}, ratio {statistics.median(ratios):.2f} "
        f"({torch.get_num_threads()} threads)"
    )
    total = sum(seconds_in.values())
    print(", ".join(f"{name} {seconds / total:.1%}" for name, seconds in seconds_in.items()))


def chats(count: int) -> list[list[dict[str, str]]]:
    """Chat prompts of mixed length and of answers of mixed length."""
    draw = random.Random(0)
    numbers = [(draw.randint(10, 99), draw.randint(2, 9)) for _ in range(count)]
    return [
        [{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)].format(a=a, b=b)}]
        for i, (a, b) in enumerate(numbers)
    ]


def rate(run: Callable[[], int]) -> float:
    """Tokens per second of a function that gives the number of tokens."""
    start = time.perf_counter()
    tokens = run()
    return tokens / (time.perf_counter() - start)


@torch.inference_mode()
def plain_generate(policy: CausalLMPolicy, prompts: Sequence[Sequence[int]]) -> int:
    """Tokens that transformers wrote, as it is used by hand."""
    torch.manual_seed(0)
    tokenizer, model = policy.tokenizer, policy.model
    tokenizer.padding_side = "left"
    per_batch, tokens = ROWS // SAMPLES_PER_PROMPT, 0
    for start in range(0, len(prompts), per_batch):
        batch = [list(ids) for ids in prompts[start : start + per_batch]]
        padded = tokenizer.pad({"input_ids": batch}, return_tensors="pt")
        out = model.generate(
            **padded,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=MAX_NEW_TOKENS,
            num_return_sequences=SAMPLES_PER_PROMPT,
        )
        for ids in out[:, padded["input_ids"].shape[1] :].tolist():
            ends = [place for place, token in enumerate(ids) if token in policy.end_ids]
            tokens += ends[0] + 1 if ends else len(ids)
    return tokens


def our_ids(policy: CausalLMPolicy, prompts: Sequence[Sequence[int]], rows: int) -> list[list[int]]:
    """Token ids of all samples, by prompt."""
    asked = [ids for ids in prompts for _ in range(SAMPLES_PER_PROMPT)]
    noises = [
        SampleNoise.for_sample(0, 1, str(prompt), index)
        for prompt in range(len(prompts))
        for index in range(SAMPLES_PER_PROMPT)
    ]
    budgets = [MAX_NEW_TOKENS] * len(asked)
    parts = lm_engine.complete(
        policy.model, asked, budgets, noises, rows, Sampling(), policy.end_ids
    )
    written = {one.place: one.ids for part in parts for one in part}
    return [written[place] for place in range(len(asked))]


def watch_engine() -> dict[str, float]:
    """Seconds that the engine spends where, from now on."""
    seconds = {"prompts": 0.0, "decoding": 0.0, "drawing": 0.0, "rest": 0.0}
    inside = {"prompts": False}

    def timed(owner: Any, name: str, label: Callable[[], str], less: bool = False) -> None:
        original = getattr(owner, name)

        def run(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            before = sum(seconds.values())
            try:
                return original(*arguments, **named)
            finally:
                spent = time.perf_counter() - start
                seconds[label()] += spent - (sum(seconds.values()) - before if less else 0.0)

        setattr(owner, name, run)

    engine: Any = lm_engine._Engine
    prefill = engine._prefill

    def watched_prefill(self: Any) -> None:
        inside["prompts"] = True
        try:
            prefill(self)
        finally:
            inside["prompts"] = False

    engine._prefill = watched_prefill
    timed(engine, "_forward", lambda: "prompts" if inside["prompts"] else "decoding")
    timed(lm_engine, "draw", lambda: "drawing")
    timed(engine, "step", lambda: "rest", less=True)
    timed(engine, "admit", lambda: "rest", less=True)
    return seconds


def show_flips(policy: CausalLMPolicy, prompts: Sequence[Sequence[int]]) -> None:
    """How many samples differ between batch sizes, and after how many equal tokens."""
    one, other = our_ids(policy, prompts, ROWS), our_ids(policy, prompts, ROWS // 4)
    equal = differing = 0
    for a, b in zip(one, other, strict=True):
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        differing += a != b
        equal += len(a) if same is None else same
    print(
        f"batch sizes {ROWS} and {ROWS // 4}: {differing} of {len(one)} samples differ, "
        f"{equal} tokens are equal up to where they do"
    )


if __name__ == "__main__":
    main()
