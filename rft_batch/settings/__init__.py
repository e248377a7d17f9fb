"""The settings of every command, one file each; `options.py` says what a field can hold."""

from rft_batch.settings.finetuning import FinetuneSettings
from rft_batch.settings.generation import GenerateSettings
from rft_batch.settings.looking import InspectSettings, ReportSettings
from rft_batch.settings.options import Settings, fingerprint, option_name, refuse_other_identity
from rft_batch.settings.selection import SelectSettings

__all__ = [
    "FinetuneSettings",
    "GenerateSettings",
    "InspectSettings",
    "ReportSettings",
    "SelectSettings",
    "Settings",
    "fingerprint",
    "option_name",
    "refuse_other_identity",
]
