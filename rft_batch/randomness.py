"""Draws that belong to a sample, not to a machine.

Every draw is a function of (seed, round, prompt_id, sample_index, stream, step), so the same sample
comes out whatever the batch, the number of processes or the number of restarts. The generator is
Philox 4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") through numpy's
`random_raw`: raw words are stable between numpy versions, distribution methods are not (NEP 19).
"""

import hashlib
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_WORDS_PER_BLOCK = 4
_COUNTER_SIZE = 1 << 256
# Positions this near each other are drawn in one go with those between them: a call costs as much
# as drawing about a thousand words.
_SPAN_WORDS = 2048

# The constants of Philox 4x64-10 (Salmon et al. 2011, section 3.3, and the code of Random123).
_PHILOX_ROUNDS = 10
_PHILOX_MULTIPLIER = (np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157))
_PHILOX_WEYL = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B))


class Stream(IntEnum):
    """What a draw is for; the streams of one sample are independent of each other.

    The numbers are part of the contract: changing one changes samples.
    """

    TOKENS = 0
    CONFIDENCE = 1
    ORDER = 2
    TRAIN_RATIO = 3
    TRAIN_MASK = 4
    CONDITION_DROP = 5
    SHUFFLE = 6
    SELECTION = 7
    DROPOUT = 8
    ADAPTERS = 9


class SampleNoise:
    """All the random words of one sample, or of one epoch, by (stream, step, index).

    Philox is a function of its counter, so this holds a position for speed but no state that
    matters: the same arguments give the same words in any order of calls.

    Args:
        identity: what the words belong to; `for_sample` makes the identity of a sample.
    """

    def __init__(self, *identity: str | int) -> None:
        key = np.frombuffer(_key(identity), dtype="<u8")
        self._philox = np.random.Philox(key=key, counter=[0] * 4)
        self._position = 0

    @classmethod
    def for_sample(
        cls, seed: int, round_number: int, prompt_id: str, sample_index: int
    ) -> "SampleNoise":
        """The noise of one sample of one prompt in one round."""
        return cls(seed, round_number, prompt_id, sample_index)

    def words(self, stream: Stream, step: int, count: int, start: int = 0) -> NDArray[np.uint64]:
        """Words `start` to `start + count` of a stream at a step.

        Args:
            stream: what they are for.
            step: sampling step, or epoch.
            count: how many.
            start: index of the first, a multiple of 4 (a Philox block).

        Returns:
            `[count]` uint64.
        """
        target = (step << 128) | (stream << 64) | (start // _WORDS_PER_BLOCK)
        self._philox.advance((target - self._position) % _COUNTER_SIZE)
        self._position = target + -(-count // _WORDS_PER_BLOCK)
        return self._philox.random_raw(count)

    def token_words(
        self, step: int, positions: Sequence[int] | NDArray[np.int64], vocab: int
    ) -> NDArray[np.uint64]:
        """One word for every token id at each of some positions.

        A position's words depend on the position, the token id and `vocab` alone: not on the
        length of the sequence nor on which other positions are drawn.

        Args:
            step: sampling step.
            positions: ascending positions in the sequence.
            vocab: number of token ids.

        Returns:
            `[len(positions), vocab]` uint64.
        """
        stride = -(-vocab // _WORDS_PER_BLOCK) * _WORDS_PER_BLOCK
        places = np.asarray(positions, dtype=np.int64)
        out = np.empty((len(places), vocab), dtype=np.uint64)
        start = 0
        while start < len(places):
            first = int(places[start])
            end = int(np.searchsorted(places, first + max(1, _SPAN_WORDS // stride)))
            near = places[start:end] - first
            drawn = self.words(Stream.TOKENS, step, (int(near[-1]) + 1) * stride, first * stride)
            out[start:end] = drawn.reshape(-1, stride)[near, :vocab]
            start = end
        return out

    def permutation(self, stream: Stream, step: int, count: int) -> NDArray[np.int64]:
        """A uniformly random order of `count` things, `[count]` int64."""
        return np.argsort(self.words(stream, step, count), kind="stable")

    def uniform(self, stream: Stream, step: int) -> float:
        """One uniform in the open interval (0, 1)."""
        return float(unit_uniform(self.words(stream, step, 1))[0])


def first_words(
    seed: int,
    round_number: int,
    prompt_ids: Sequence[str],
    sample_indexes: Sequence[int],
    stream: Stream,
) -> NDArray[np.uint64]:
    """The first word at step 0 of a stream of each of many samples, `[samples]` uint64.

    What `SampleNoise.for_sample(...).words(stream, 0, 1)` gives, eight times as fast: numpy's
    generator costs microseconds to set up for one word, so its rounds are done here for all.
    """
    digests = b"".join(
        _key((seed, round_number, prompt_id, index))
        for prompt_id, index in zip(prompt_ids, sample_indexes, strict=True)
    )
    keys = np.frombuffer(digests, dtype="<u8").reshape(-1, 2)
    key0, key1 = keys[:, 0].copy(), keys[:, 1].copy()
    # numpy counts up before it draws, so the first block has the lowest word of its counter at 1.
    x0, x1, x2, x3 = (np.full(len(keys), word, dtype=np.uint64) for word in (1, stream, 0, 0))
    for number in range(_PHILOX_ROUNDS):
        if number:
            key0 += _PHILOX_WEYL[0]
            key1 += _PHILOX_WEYL[1]
        high0, low0 = _product(x0, _PHILOX_MULTIPLIER[0])
        high1, low1 = _product(x2, _PHILOX_MULTIPLIER[1])
        x0, x1, x2, x3 = high1 ^ x1 ^ key0, low1, high0 ^ x3 ^ key1, low0
    return x0


def _product(a: NDArray[np.uint64], b: np.uint64) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """High and low word of a product of 64-bit words, by halves of 32 bits."""
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    a_high, a_low, b_high, b_low = a >> half, a & mask, b >> half, b & mask
    middle = a_high * b_low + (a_low * b_low >> half)
    carried = a_low * b_high + (middle & mask)
    return a_high * b_high + (middle >> half) + (carried >> half), a * b


def _key(identity: Sequence[str | int]) -> bytes:
    """The 16 bytes that key the generator of an identity."""
    return hashlib.blake2b(repr(("rft1", *identity)).encode(), digest_size=16).digest()


def unit_uniform(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Words as uniforms in the open interval (0, 1), float64, the shape kept.

    52 bits and half a step: never 0 and never 1, so `log(-log(u))` is finite for every word. With
    53 bits the half is lost to rounding in the upper half, and the largest word becomes 1.
    """
    return ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def gumbel(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Words as standard Gumbel draws, float64, the shape kept.

    float64 on purpose: a float32 tail cut lowers the effective temperature (Zheng et al. 2024,
    arXiv 2409.02908).
    """
    return -np.log(-np.log(unit_uniform(words)))
