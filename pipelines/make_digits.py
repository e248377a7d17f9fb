"""Makes `data/digits`: the prompts, the classifier of the reward, and a mediocre policy.

    python pipelines/make_digits.py

Takes the 1,797 UCI digits that scikit-learn ships, keeps 400 for testing, and stops the policy's
pretraining early on purpose, so that rejection fine-tuning has something to improve.
"""

import json
import sys
from pathlib import Path

import click
import numpy as np
import torch
from digits_reward import CLASSIFIER, classify
from numpy.typing import NDArray
from safetensors.numpy import save_file
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

from rft_batch.policies.maskgit import MaskGITPolicy
from rft_batch.policies.token_model import (
    ClassCondition,
    Display,
    Recipe,
    TokenModelSpec,
    save_policy,
)
from rft_batch.policies.token_transformer import TokenTransformer
from rft_batch.randomness import SampleNoise, Stream

SEED = 0
SPEC = TokenModelSpec(
    family="maskgit",
    model="rft_batch.policies.token_transformer:TokenTransformer",
    model_arguments={"vocab_size": 17, "seq_len": 64, "num_classes": 10},
    vocab_size=17,
    mask_id=17,
    seq_len=64,
    condition=ClassCondition(num_classes=10, null_class=10),
    recipe=Recipe(condition_dropout=0.1),
    display=Display(height=8, width=8, levels=17),
)


@click.command(help=__doc__)
@click.option("--epochs", default=24, help="Passes over the 1,397 training images.")
@click.option("--learning-rate", default=1e-3)
def main(epochs: int, learning_rate: float) -> None:
    """Writes every file of the folder."""
    folder = CLASSIFIER.parent
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(
        images.astype(np.int64), labels, test_size=400, random_state=SEED, stratify=labels
    )
    train_images, test_images, train_labels, test_labels = split
    folder.mkdir(parents=True, exist_ok=True)
    write_classifier(folder, train_images, train_labels)
    write_prompts(folder)
    write_anchor(folder, test_images, test_labels)
    accuracy = (classify(test_images.astype(np.float64)).argmax(1) == test_labels).mean()
    print(f"classifier: {accuracy:.3f} of 400 test images right")
    policy = pretrain(folder, train_images, train_labels, epochs, learning_rate)
    print(f"policy: {held_out_reward(policy):.3f} mean reward of 400 samples")


def write_classifier(folder: Path, images: NDArray[np.int64], labels: NDArray[np.int64]) -> None:
    """Fits the reward's perceptron and writes its weights, which load without pickle."""
    network = MLPClassifier(hidden_layer_sizes=(128,), alpha=1.0, max_iter=400, random_state=SEED)
    network.fit(images / 16, labels)
    names = ["hidden.weight", "output.weight", "hidden.bias", "output.bias"]
    arrays = [*network.coefs_, *network.intercepts_]
    tensors = {n: np.ascontiguousarray(a, np.float32) for n, a in zip(names, arrays, strict=True)}
    save_file(tensors, folder / CLASSIFIER.name)


def write_prompts(folder: Path) -> None:
    """100 prompts to train on and 100 held out, ten of each class."""
    for name, prefix in (("prompts.jsonl", "train"), ("held_out.jsonl", "held-out")):
        rows = [{"prompt_id": f"{prefix}-{i:03}", "prompt": i % 10} for i in range(100)]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_anchor(folder: Path, images: NDArray[np.int64], labels: NDArray[np.int64]) -> None:
    """The test images as rows that a policy's loss can be measured on."""
    rows = [
        {"prompt_id": f"test-{i:03}", "prompt": int(label), "completion_ids": image.tolist()}
        for i, (image, label) in enumerate(zip(images, labels, strict=True))
    ]
    (folder / "anchor.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def pretrain(
    folder: Path,
    images: NDArray[np.int64],
    labels: NDArray[np.int64],
    epochs: int,
    learning_rate: float,
) -> MaskGITPolicy:
    """Trains on the real digits with the family's own loss and publishes the policy."""
    torch.manual_seed(SEED)
    save_policy(folder / "policy", SPEC, TokenTransformer(**SPEC.model_arguments).state_dict())
    policy = MaskGITPolicy(folder / "policy")
    model = policy.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    rows = [
        {"prompt_id": str(i), "prompt": str(label), "completion_ids": image}
        for i, (image, label) in enumerate(zip(images, labels, strict=True))
    ]
    noises = [SampleNoise("pretraining", i) for i in range(len(rows))]
    batch_size = 64
    total = epochs * -(-len(rows) // batch_size)
    step = 0
    for epoch in range(epochs):
        order = SampleNoise("pretraining").permutation(Stream.SHUFFLE, epoch, len(rows))
        for places in np.split(order, range(batch_size, len(rows), batch_size)):
            warm_up = min(1.0, (step + 1) / 50)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * warm_up * (1 - step / total)
            batch = policy.collate([rows[i] for i in places], [noises[i] for i in places], epoch)
            loss = policy.loss(model, batch.tensors) / batch.num_targets
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
        print(f"epoch {epoch + 1}/{epochs}: loss {loss.item():.3f}", file=sys.stderr)
    model.eval()
    policy.save(folder / "policy", model.state_dict())
    return policy


def held_out_reward(policy: MaskGITPolicy) -> float:
    """Mean reward of 400 fresh samples at the settings of generation."""
    sampler = policy.sampler(
        order="random",
        steps=32,
        schedule="linear",
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        choice_temperature=4.5,
        guidance_scale=1.0,
    )
    prompts = [i % 10 for i in range(400)]
    scores = []
    for start in range(0, 400, 50):
        noises = [SampleNoise("check", start + i) for i in range(50)]
        ids = sampler(prompts[start : start + 50], noises).ids
        probabilities = classify(np.asarray(ids, dtype=np.float64))
        scores.extend(probabilities[range(50), prompts[start : start + 50]])
    return float(np.mean(scores))


if __name__ == "__main__":
    main()
