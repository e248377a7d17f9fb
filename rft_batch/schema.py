"""The two Parquet schemas and the words that stand in them; their documentation is here.

Both carry key-value metadata: `rft_batch.schema_version`, `rft_batch.shard` (its number),
`rft_batch.fingerprint` (of the settings that made it), and for sample shards
`rft_batch.policy` (the policy's digest) and `rft_batch.own_loss` (JSON of sum and count).
"""

import pyarrow as pa

SCHEMA_VERSION = 1


def _field(name: str, kind: pa.DataType, doc: str, nullable: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=nullable, metadata={"description": doc})


_WORD = pa.dictionary(pa.int32(), pa.string())
_IDS = pa.list_(pa.field("element", pa.int32(), nullable=False))
# Not map<string, float32>: datasets 5.2 cannot read a map column.
_TERMS = pa.list_(
    pa.struct([pa.field("reward", pa.string(), nullable=False), pa.field("score", pa.float32())])
)

SAMPLES = pa.schema(
    [
        _field("prompt_id", pa.string(), "id of the prompt"),
        _field("sample_index", pa.int32(), "0 to K-1; with prompt_id it names a sample for ever"),
        _field(
            "rank", pa.int32(), "place by score in its prompt, 0 = best; null: not scored", True
        ),
        _field("score", pa.float32(), "weighted sum of the rewards; null: not scored", True),
        _field("score_error", _WORD, "why it was not scored", True),
        _field("prompt", pa.string(), "text, or JSON of the label, messages or known tokens"),
        _field("prompt_ids", _IDS, "token ids of the prompt, where it has any"),
        _field("completion", pa.string(), "text; null without a tokenizer", True),
        _field("completion_ids", _IDS, "token ids of the completion"),
        _field("finish_reason", _WORD, "stop, length or error"),
        _field("reward_terms", _TERMS, "each reward's own score"),
        _field("logprob", pa.float32(), "nats, under the sampling policy; null: none", True),
    ]
)
"""One row for each sample; all samples of a prompt stand in the same shard."""

FLAGS = pa.schema(
    [
        _field("prompt_id", pa.string(), "as in the sample shard, row for row"),
        _field("sample_index", pa.int32(), "as in the sample shard, row for row"),
        _field("selected", pa.bool_(), "whether it is trained on"),
        _field("reason", _WORD, "why, or why not: see REASONS"),
    ]
)
"""One row for each row of the sample shard of the same name, in the same order."""

REASONS = {
    "top_k": "kept: among the best of its prompt, or of the round under --scope global",
    "random": "kept: drawn by --strategy random",
    "below_top_k": "left out: others scored higher",
    "not_drawn": "left out: --strategy random drew others",
    "below_min_score": "left out: score below --min-score",
    "duplicate": "left out: another sample of its prompt has its key under --distinct-by",
    "banned": "left out: --distinct-by gave it no key",
    "truncated": "left out: cut off by a limit",
    "too_short": "left out: fewer tokens than --min-tokens",
    "no_spread": "left out: all scores of its prompt are equal, --drop-no-spread",
    "too_easy": "left out: more of its prompt pass than --max-pass-rate allows",
    "not_scored": "left out: it has no finite score",
}
"""What the column `reason` says, in the order of the closing table and of `ranking.Reason`."""

KEPT_REASONS = frozenset({"top_k", "random"})
