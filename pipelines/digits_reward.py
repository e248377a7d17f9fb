"""The reward of the digits pipeline: how sure a classifier of real digits is of the asked class."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

CLASSIFIER = Path(__file__).resolve().parent.parent / "data" / "digits" / "classifier.safetensors"


def class_probability(
    prompts: Sequence[Any], completion_ids: Sequence[Sequence[int]], **columns: Any
) -> list[float]:
    """Probability in [0, 1] of each prompt's class under the classifier.

    Args:
        prompts: class labels, 0 to 9.
        completion_ids: 64 grey levels each, 0 to 16, row by row.
        columns: not used.
    """
    probabilities = classify(np.asarray(completion_ids, dtype=np.float64))
    return probabilities[np.arange(len(prompts)), list(prompts)].tolist()


def classify(images: NDArray[np.float64]) -> NDArray[np.float64]:
    """Class probabilities `[batch, 10]` of images `[batch, 64]`, grey levels 0 to 16.

    A perceptron with one hidden layer of rectified units; float64, so that a score does not
    depend on which other images are scored with it.
    """
    weights = _weights()
    hidden = np.maximum(images / 16 @ weights["hidden.weight"] + weights["hidden.bias"], 0)
    logits = hidden @ weights["output.weight"] + weights["output.bias"]
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)


@cache
def _weights() -> dict[str, NDArray[np.float64]]:
    return {name: array.astype(np.float64) for name, array in load_file(CLASSIFIER).items()}
