"""Completions of a causal language model by vLLM, offline (`--engine vllm`).

Every sample has a seed of its own, made of its noise. vLLM gives the same tokens for the same seed
only as far as its logits do not change with the batch; the other engine is the exact one.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from torch import nn

from rft_batch.errors import InputError
from rft_batch.policies.lm_text import text_of
from rft_batch.policies.protocol import Completions, Sampler
from rft_batch.randomness import SampleNoise, Stream

# vLLM takes seeds of a signed 64-bit number; a positive one is the same in every version.
_SEED_BITS = 31


class _Policy(Protocol):
    folder: Any
    model: nn.Module
    tokenizer: Any
    end_ids: frozenset[int]

    def encode_prompts(
        self, prompts: Sequence[Any], options: Mapping[str, Any]
    ) -> list[list[int]]: ...
    def split_by_room(self, encoded: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]: ...
    def room(self, ids: Sequence[int], max_new_tokens: int) -> int: ...
    def refusals(self, encoded: Sequence[Sequence[int]]) -> Completions: ...


def vllm_sampler(policy: _Policy, options: Mapping[str, Any]) -> Sampler:
    """The function that generates one completion for each prompt and its noise, all in one call.

    Args:
        policy: its weights are let go: vLLM loads its own.
        options: those of `CausalLMPolicy.sampler`; `engine_arguments` goes to `vllm.LLM`.

    Raises:
        InputError: vLLM is not installed, or `engine_arguments` is not an object of JSON.
    """
    try:
        from vllm import LLM, SamplingParams
    except ImportError as error:
        raise InputError(
            f"--engine vllm: vLLM cannot be imported: {error}. pip install 'rft-batch[vllm]', or "
            "leave --engine out."
        ) from error
    arguments = engine_arguments(options["engine_arguments"])
    policy.model = nn.Identity()
    llm = LLM(model=str(policy.folder), **arguments)

    def sample(
        prompts: Sequence[Any], noises: Sequence[SampleNoise], batch_size: int
    ) -> Iterator[tuple[Sequence[int], Completions]]:
        encoded = policy.encode_prompts(prompts, options)
        fitting, refused = policy.split_by_room(encoded)
        if refused:
            yield refused, policy.refusals([encoded[place] for place in refused])
        parameters = [
            SamplingParams(
                **sampling_arguments(
                    options,
                    policy.end_ids,
                    noises[place],
                    policy.room(encoded[place], options["max_new_tokens"]),
                )
            )
            for place in fitting
        ]
        inputs = [{"prompt_token_ids": encoded[place]} for place in fitting]
        outputs = llm.generate(inputs, parameters, use_tqdm=False)
        yield fitting, _completions(policy, outputs, options)

    return sample


def engine_arguments(text: str | None) -> dict[str, Any]:
    """The keyword arguments of `vllm.LLM` from a JSON object.

    Raises:
        InputError: it is not one.
    """
    try:
        arguments = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise InputError(f"--engine-arguments {text!r}: not JSON: {error}.") from error
    if not isinstance(arguments, dict):
        raise InputError(f"--engine-arguments {text!r}: expected an object of JSON.")
    return arguments


def sampling_arguments(
    options: Mapping[str, Any], end_ids: frozenset[int], noise: SampleNoise, budget: int
) -> dict[str, Any]:
    """The keyword arguments of one sample's `vllm.SamplingParams`.

    Args:
        options: those of `CausalLMPolicy.sampler`.
        end_ids: token ids that end a completion.
        noise: the sample's; its first word is the seed.
        budget: tokens that the completion may have.
    """
    word = int(noise.words(Stream.TOKENS, 0, 1)[0])
    return {
        "n": 1,
        "seed": word >> (64 - _SEED_BITS),
        "temperature": options["temperature"],
        "top_k": options["top_k"],
        "top_p": options["top_p"],
        "min_p": options["min_p"],
        "repetition_penalty": options["repetition_penalty"],
        "max_tokens": budget,
        "stop": list(options["stop"]) or None,
        "stop_token_ids": sorted(end_ids),
        "logprobs": 0,
    }


def _completions(
    policy: _Policy, outputs: Sequence[Any], options: Mapping[str, Any]
) -> Completions:
    written = [output.outputs[0] for output in outputs]
    cut = any(options[name] for name in ("top_k", "min_p")) or options["top_p"] != 1
    own = options["temperature"] == 1 and options["repetition_penalty"] == 1 and not cut
    # vLLM's log-probabilities are those of the model before temperature and cuts.
    logprobs = [float(one.cumulative_logprob) for one in written]
    return Completions(
        prompt_ids=[list(output.prompt_token_ids) for output in outputs],
        ids=[np.array(one.token_ids, dtype=np.int32) for one in written],
        texts=[text_of(policy.tokenizer, one.token_ids, options["stop"]) for one in written],
        finish_reasons=["stop" if one.finish_reason == "stop" else "length" for one in written],
        logprobs=[logprob if own else None for logprob in logprobs],
        losses=[-logprob for logprob in logprobs],
        errors=[None] * len(written),
    )
