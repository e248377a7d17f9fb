"""A small bidirectional transformer over a grid or sequence of tokens, from `torch.nn` parts.

Shapes: `batch` sequences of `seq_len` tokens; `vocab` codebook ids 0..vocab-1, then the mask id.
"""

import torch
from torch import Tensor, nn


class TokenTransformer(nn.Module):
    """Logits of every position given all the others.

    Args:
        vocab_size: number of codebook ids; the mask id is `vocab_size`, so the embedding has one
            row more, and the logits have none for it.
        seq_len: number of positions.
        num_classes: number of class labels; the null class is `num_classes`. 0: no classes.
        width: size of the hidden states.
        num_layers: number of transformer layers.
        num_heads: attention heads in each.
        dropout: dropout probability while training.
    """

    def __init__(
        self,
        vocab_size: int,
        seq_len: int,
        num_classes: int = 0,
        width: int = 96,
        num_layers: int = 4,
        num_heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size + 1, width)
        self.positions = nn.Parameter(torch.randn(seq_len, width) * 0.02)
        self.classes = nn.Embedding(num_classes + 1, width) if num_classes else None
        layer = nn.TransformerEncoderLayer(
            width,
            num_heads,
            dim_feedforward=4 * width,
            dropout=dropout,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, x: Tensor, class_labels: Tensor | None = None) -> Tensor:
        """Logits.

        Args:
            x: `[batch, seq_len]` int64, token ids, the mask id where unknown.
            class_labels: `[batch]` int64, the null class where there is no condition; only where
                the model has classes.

        Returns:
            `[batch, seq_len, vocab]`, the dtype of the weights or of autocast.
        """
        hidden = self.tokens(x) + self.positions
        if self.classes is not None:
            hidden = hidden + self.classes(class_labels)[:, None]
        logits: Tensor = self.head(self.norm(self.layers(hidden)))
        return logits
