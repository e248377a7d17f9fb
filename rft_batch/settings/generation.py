"""The settings of `rft-batch generate`."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rft_batch.settings.options import Settings, name_problems, option


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(Settings):
    """Settings of `rft-batch generate`."""

    round_dir: Path = option(help="Folder of the round.", argument=True, identity=False)
    policy: Path | None = option(
        None,
        help="Policy to sample: a folder, or a hub id; needed but for --rescore.",
        identity=False,
        path=True,
        hub=True,
    )
    prompts: Path = option(help="Prompts: a .jsonl or .parquet file.", identity=False, path=True)
    reward: tuple[str, ...] = option(
        (),
        help="module:function or file.py:function, also with (name=value); repeat it for a sum.",
        path=True,
        identity=False,
    )
    reward_weight: tuple[float, ...] = option(
        (), help="Weight of each --reward, then of each --reward-model; default 1 each."
    )
    reward_model: tuple[str, ...] = option(
        (),
        help="Sequence classifier that scores: a folder, or a name on the hub; repeat it.",
        path=True,
        hub=True,
        identity=False,
    )
    reward_output: tuple[str, ...] = option(
        (),
        help="The output that is the score: 0, or softmax:1; of each model, or of all.",
        identity=False,
    )
    reward_batch_size: int = option(
        16, help="Texts per forward pass of a reward model.", identity=False, minimum=1
    )
    reward_workers: int = option(
        0,
        help="Processes for the functions, one completion at a time; 0: in the main thread.",
        identity=False,
        minimum=0,
    )
    reward_timeout: float | None = option(
        None,
        help="Longest time of a function for one completion; then its process is ended; seconds.",
        identity=False,
        above=0,
    )
    rescore: str | None = option(
        None,
        help="Score the samples of this folder of ROUND anew, into --into; nothing is generated.",
        identity=False,
    )
    samples_per_prompt: int = option(8, help="K, the samples of every prompt.", minimum=1)
    seed: int = option(0, help="Seed of every draw.", minimum=0)
    round_number: int | None = option(
        None, help="Round number in the draws' keys; default: the number at ROUND's end.", minimum=0
    )
    into: str = option("samples", help="Folder in ROUND to write: samples, eval, ...")
    order: str = option(
        "random",
        help="Order of unmasking: random samples the policy itself; confidence is for showing.",
        choices=("random", "confidence"),
        family=True,
    )
    steps: int = option(32, help="Forward passes per completion, at most.", minimum=1, family=True)
    schedule: str = option(
        "linear",
        help="How the masked share falls over the steps.",
        choices=("cosine", "linear", "square", "cubic", "root", "arccos"),
        family=True,
    )
    temperature: float = option(
        1.0, help="Temperature of the tokens; 0: likeliest.", minimum=0, family=True
    )
    top_k: int = option(0, help="Keep the k likeliest tokens; 0: all.", minimum=0, family=True)
    top_p: float = option(
        1.0,
        help="Keep the likeliest tokens up to this mass; 1: all.",
        above=0,
        maximum=1,
        family=True,
    )
    choice_temperature: float = option(
        4.5, help="Noise on the confidences of --order confidence.", minimum=0, family=True
    )
    guidance_scale: float = option(
        1.0, help="Classifier-free guidance u + s(c-u); 1: none.", minimum=0, family=True
    )
    min_p: float = option(
        0.0,
        help="Drop tokens less likely than this share of the likeliest; 0: none.",
        minimum=0,
        maximum=1,
        family=True,
    )
    repetition_penalty: float = option(
        1.0, help="Divides the logits of tokens that were written; 1: none.", above=0, family=True
    )
    max_new_tokens: int = option(
        256, help="Tokens per completion, at most.", minimum=1, family=True
    )
    stop: tuple[str, ...] = option(
        (), help="String that ends a completion, left out of its text; repeat it.", family=True
    )
    system: str | None = option(
        None, help="System message before the messages of every prompt.", family=True
    )
    chat: bool = option(False, help="Take a text prompt as the message of a user.", family=True)
    chat_template_arguments: str | None = option(
        None, help="JSON object for the chat template.", family=True
    )
    engine: str = option(
        "transformers",
        help="What runs a language model.",
        choices=("transformers", "vllm"),
        family=True,
    )
    engine_arguments: str | None = option(
        None, help="JSON object for vLLM's LLM, such as its tensor_parallel_size.", family=True
    )
    id_column: str = option("prompt_id", help="Column of the prompts' ids.", identity=False)
    prompt_column: str = option("prompt", help="Column of the prompts.", identity=False)
    prompts_per_shard: int = option(
        256, help="Prompts per shard, the unit of work and of resumption.", minimum=1
    )
    limit: int | None = option(
        None,
        help="Stop after this many prompts, rounded up to whole shards; the stage stays partial.",
        identity=False,
        minimum=1,
    )
    anchor: Path | None = option(
        None,
        help="Rows with completion_ids whose loss is recorded beside that of the samples.",
        identity=False,
        path=True,
    )
    max_error_rate: float = option(
        0.1,
        help="Share of unscored rows above which the stage fails.",
        identity=False,
        minimum=0,
        maximum=1,
    )
    batch_size: int | None = option(
        None, help="Samples per forward pass; default: found by itself.", identity=False, minimum=1
    )
    device: str = option("auto", help="auto, cpu, cuda, mps.", identity=False)
    dtype: str = option(
        "auto",
        help="Of the weights; auto: bfloat16 on a GPU that has it, else float32.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    trust_policy_code: bool = option(
        False, help="Run model code that the policy names outside rft_batch.", identity=False
    )

    def contradictions(self) -> Iterator[str]:
        """Names of folders, that there is something to score, a loss that vLLM cannot give."""
        yield from name_problems("into", self.into)
        if self.rescore is None and self.policy is None:
            yield "--policy: none given. Pass the folder to sample, or --rescore FOLDER."
        if self.rescore is not None:
            yield from name_problems("rescore", self.rescore)
            if self.rescore == self.into:
                yield (
                    f"--rescore {self.rescore}: samples are never written again. "
                    "Pass another name with --into."
                )
        if self.anchor is not None and self.engine == "vllm":
            yield (
                "--anchor with --engine vllm: vLLM has the weights to itself, and nothing is left "
                "that computes a loss. Leave one of them out."
            )

    @property
    def key_round(self) -> int:
        """The round number in the draws' keys."""
        if self.round_number is not None:
            return self.round_number
        digits = re.search(r"\d+$", self.round_dir.resolve().name)
        return int(digits.group()) if digits else 0
