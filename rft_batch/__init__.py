"""Offline rejection fine-tuning: generate, select, finetune, report.

Importing the package loads nothing heavy; each stage is a plain function of its settings in the
module that bears its name (`rft_batch.generation.generate`, ...).
"""

__version__ = "0.2.0"
