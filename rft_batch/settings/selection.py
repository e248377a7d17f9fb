"""The settings of `rft-batch select`."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft_batch.settings.options import Settings, name_problems, option

_TOP_K_OF_PROMPT = 2


@dataclass(frozen=True, kw_only=True)
class SelectSettings(Settings):
    """Settings of `rft-batch select`."""

    round_dir: Path = option(help="Folder of the round.", argument=True, identity=False)
    samples: str = option("samples", help="Folder in ROUND with the samples.", identity=False)
    scope: str = option(
        "prompt",
        help="What is compared: the samples of a prompt, or of the whole round.",
        choices=("prompt", "global"),
    )
    top_k: int | None = option(
        None, help="Samples to keep in the scope; default: 2 of every prompt.", minimum=1
    )
    top_fraction: float | None = option(
        None,
        help="Share of the round's scored samples to keep, under --scope global.",
        above=0,
        maximum=1,
    )
    min_score: float | None = option(None, help="Lowest score that may be kept.")
    distinct_by: str | None = option(
        None,
        help="Of a prompt's samples with one key keep the best: completion (token ids), "
        "equations, module:function or file.py:function.",
        identity=False,
        path=True,
    )
    drop_no_spread: bool = option(
        False, help="Leave out prompts whose scores, two or more, are all equal."
    )
    max_pass_rate: float | None = option(
        None,
        help="Leave out prompts of which a larger share of the scored samples reaches --min-score.",
        minimum=0,
        maximum=1,
    )
    strategy: str = option(
        "best",
        help="best, or random: the matched control, as many of every prompt but drawn.",
        choices=("best", "random"),
    )
    seed: int = option(0, help="Seed of --strategy random.", minimum=0)
    min_tokens: int = option(
        0, help="Fewest tokens of a completion that is kept, its end not counted.", minimum=0
    )
    keep_truncated: bool = option(False, help="Let samples be kept that a limit cut off.")
    into: str = option("selection", help="Folder in ROUND to write.")
    allow_partial: bool = option(
        False,
        help="Select from the finished shards of a stage that is not complete.",
        identity=False,
    )
    strict_k: bool = option(
        False, help="Fail when a prompt has fewer than --top-k samples to keep.", identity=False
    )
    require_nonempty: bool = option(False, help="Fail when nothing is selected.", identity=False)
    dry_run: bool = option(False, help="Show the counts and write nothing.", identity=False)

    def contradictions(self) -> Iterator[str]:
        """The names of the folders, and options that need or exclude each other."""
        yield from name_problems("samples", self.samples)
        yield from name_problems("into", self.into)
        if self.into == self.samples:
            yield f"--into {self.into}: that is the folder of the samples. Choose another name."
        if self.min_score is not None and self.min_score != self.min_score:
            yield "--min-score nan: not a number."
        if self.max_pass_rate is not None and self.min_score is None:
            yield "--max-pass-rate: needs --min-score, the score that passes."
        if self.scope == "global":
            if (self.top_k is None) == (self.top_fraction is None):
                yield "--scope global: needs one of --top-k and --top-fraction."
            if self.strict_k:
                yield "--strict-k: counts the samples of a prompt. Leave out --scope global."
        elif self.top_fraction is not None:
            yield "--top-fraction: a share of the whole round. Add --scope global."

    def identity(self, **contents: Any) -> dict[str, Any]:
        """As of all settings; the default of `top_k` is recorded as the number that it means."""
        top_k = self.top_k_of_prompt if self.scope == "prompt" else self.top_k
        return super().identity(**{"top_k": top_k, **contents})

    @property
    def top_k_of_prompt(self) -> int:
        """Samples to keep of every prompt under the scope `prompt`."""
        return _TOP_K_OF_PROMPT if self.top_k is None else self.top_k
