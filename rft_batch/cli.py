"""The commands: options and TOML -> settings -> one stage -> exit code.

The only module that knows click, and the only one that turns errors into text and exit codes. It
imports nothing heavy: a stage is imported inside its command.
"""

import sys
import tomllib
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

import click

from rft_batch import __version__
from rft_batch.errors import InputError, RftError
from rft_batch.import_strings import ImportString
from rft_batch.processes import exit_on_sigterm, is_main_process
from rft_batch.settings import (
    FinetuneSettings,
    GenerateSettings,
    InspectSettings,
    ReportSettings,
    SelectSettings,
    Settings,
    option_name,
)
from rft_batch.tables import figures_table


class ConfiguredCommand(click.Command):
    """A command whose options can also stand in its table of a TOML file.

    `[generate]` holds the options of `generate`; `[generate.eval]` those that replace them under
    `--into eval`. The command line wins over both.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Takes the defaults from the file before anything else is read."""
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        if given.get("config"):
            ctx.default_map = self._defaults(Path(given["config"]), given.get("into"))
        return super().parse_args(ctx, args)

    def _defaults(self, path: Path, into: str | None) -> dict[str, Any]:
        tables = _read_toml(path)
        _refuse_unknown(tables, set(cli.commands), f"{path}: table")
        table = tables.get(self.name or "", {})
        if not isinstance(table, dict):
            raise InputError(f"{path}: {self.name} must be a table, [{self.name}].")
        plain = {key: value for key, value in table.items() if not isinstance(value, dict)}
        variants = {key: value for key, value in table.items() if isinstance(value, dict)}
        if into in variants:
            plain |= variants[into]
        known = {p.name for p in self.params if isinstance(p, click.Option) and p.name != "config"}
        for where, part in (("", plain), *((f".{k}", v) for k, v in variants.items())):
            _refuse_unknown(part, known, f"{path}: [{self.name}{where}]")
        options = [p for p in self.params if isinstance(p, SettingOption)]
        rules = {p.name: p.rules for p in options}
        is_path = {p.name: isinstance(p.type, click.Path) or p.rules["hub"] for p in options}
        return {
            key: _from_folder(value, path.parent, is_path.get(key, False), rules[key]["hub"])
            if rules[key]["path"]
            else value
            for key, value in plain.items()
        }


class SettingOption(click.Option):
    """An option that was made from a field of a settings class."""

    rules: Mapping[str, Any]
    """What the field says of itself."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rft-batch")
def cli() -> None:
    """Offline rejection fine-tuning: generate, select, finetune, report, inspect.

    A policy writes K completions for every prompt, a reward scores them, the best are kept, and the
    policy is fine-tuned on those alone. Each stage leaves files that the next one reads.
    """


def main() -> None:
    """Runs the command line and exits with its code."""
    exit_on_sigterm()
    try:
        cli.main(standalone_mode=False)
    except RftError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except OSError as error:
        click.echo(f"Error: {error}. What is published is whole; run it again.", err=True)
        sys.exit(3)
    except (click.Abort, KeyboardInterrupt):
        click.echo("Stopped. The same command goes on where it was.", err=True)
        sys.exit(130)


def _command(settings: type[Settings], example: str) -> Callable[[Any], ConfiguredCommand]:
    """A decorator that makes a command of a function of settings."""

    def decorate(function: Callable[[Any], None]) -> ConfiguredCommand:
        def callback(config: str | None, **values: Any) -> None:
            function(settings(**values))

        config = click.Option(
            ["--config"], type=click.Path(), help="TOML file with a table per command."
        )
        return ConfiguredCommand(
            name=function.__name__.removesuffix("_command"),
            callback=callback,
            params=[*map(_parameter, fields(settings)), config],
            help=f"{function.__doc__}\n\n\b\nExample:\n  {example}",
        )

    return decorate


def _parameter(f: "Field[Any]") -> click.Parameter:
    kind, repeated = _click_type(f)
    if f.metadata["argument"]:
        name = f.name.removesuffix("_dir").upper()
        return click.Argument([f.name], type=kind, metavar=name)
    required = f.default is MISSING
    names = [option_name(f.name)]
    if f.type is bool:
        names = [f"{names[0]}/--no-{names[0][2:]}"]
    made = SettingOption(
        [*names, f.name],
        type=None if f.type is bool else kind,
        default=None if required else f.default,
        required=required,
        multiple=repeated,
        help=f.metadata["help"],
        show_default=f.default not in (None, MISSING, ()),
    )
    made.rules = f.metadata
    return made


def _click_type(f: "Field[Any]") -> tuple[Any, bool]:
    """Click's type of a field, and whether the option can be repeated."""
    if f.metadata["choices"]:
        return click.Choice(f.metadata["choices"]), False
    kind = f.type
    if isinstance(kind, UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not NoneType)
    repeated = typing.get_origin(kind) is tuple
    if repeated:
        kind = typing.get_args(kind)[0]
    return (click.Path(path_type=Path) if kind is Path else kind), repeated


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"--config {path}: there is no such file.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"--config {path}: not TOML: {error}.") from error


def _refuse_unknown(found: Mapping[str, Any], known: set[str], where: str) -> None:
    for name in found:
        if name not in known:
            near = get_close_matches(name, sorted(known), n=1)
            hint = f' Did you mean "{near[0]}"?' if near else f" Known: {', '.join(sorted(known))}."
            raise InputError(f'{where} has the unknown key "{name}".{hint}')


def _from_folder(value: Any, folder: Path, is_path: bool, hub: bool = False) -> Any:
    """A relative path, or the relative file of an import string, as seen from the file's folder."""
    if isinstance(value, list):
        return [_from_folder(item, folder, is_path, hub) for item in value]
    if not isinstance(value, str):
        return value
    if hub and not (folder / value).exists():
        return value
    if parts := ImportString.parse(value):
        return parts.seen_from(folder)
    return str(folder / value) if is_path else value


@cli.add_command
@_command(
    GenerateSettings,
    "rft-batch generate runs/mine/round-1 --policy my-policy \\\n"
    "      --prompts prompts.jsonl --reward reward.py:score",
)
def generate_command(settings: GenerateSettings) -> None:
    """Sample every prompt K times and score the samples."""
    if settings.rescore is None:
        from rft_batch.generation import generate as make
    else:
        from rft_batch.rescoring import rescore as make

    manifest = make(settings)
    if "unfinished_shards" in manifest:
        if is_main_process():
            why = "partial, as --limit asked" if settings.limit else "other processes are at work"
            click.echo(f"{manifest['folder']}: {why}")
        return
    own, anchor = manifest["own_loss"], manifest["anchor_loss"]
    click.echo(
        figures_table(
            {
                **manifest["counts"],
                "mean score": manifest["scores"]["mean"],
                "mean of the best": manifest["scores"]["mean_of_best"],
                "own loss (nats per token)": own,
                "anchor loss (nats per token)": anchor,
            }
        )
    )


@cli.add_command
@_command(SelectSettings, "rft-batch select runs/mine/round-1 --top-k 2 --min-score 0.5")
def select_command(settings: SelectSettings) -> None:
    """Flag the samples that are to be trained on."""
    from rft_batch.selection import select

    manifest = select(settings)
    counts = manifest["counts"]
    click.echo(figures_table({**counts, **manifest["reasons"]}))
    if settings.dry_run:
        click.echo("Dry run: nothing was written.")
    if not counts["selected"]:
        click.echo("Warning: nothing is selected; finetune will refuse it.", err=True)
    # Under --scope global a prompt may have as many as its samples deserve.
    elif settings.scope == "prompt" and counts["prompts_with_fewer"] + counts["prompts_with_none"]:
        click.echo(
            f"Warning: {counts['prompts_with_fewer']} prompts have fewer than "
            f"{settings.top_k_of_prompt} samples to keep and {counts['prompts_with_none']} "
            "have none.",
            err=True,
        )


@cli.add_command
@_command(FinetuneSettings, "rft-batch finetune runs/mine/round-1 --policy my-policy --epochs 4")
def finetune_command(settings: FinetuneSettings) -> None:
    """Fine-tune the policy on the selected samples."""
    from rft_batch.finetuning import finetune

    manifest = finetune(settings)
    if is_main_process():
        click.echo(
            figures_table(
                {**manifest["counts"], "loss of the last epoch": manifest["last_epoch_loss"]}
            )
        )


@cli.add_command
@_command(ReportSettings, "rft-batch report runs/mine --control runs/mine-random")
def report_command(settings: ReportSettings) -> None:
    """Tabulate and draw all rounds of a run."""
    from rft_batch.reporting import report

    click.echo(report(settings))


@cli.add_command
@_command(InspectSettings, "rft-batch inspect runs/mine/round-1 --best 4 --verify")
def inspect_command(settings: InspectSettings) -> None:
    """Show what a round holds, and whether it is whole."""
    from rft_batch.inspection import inspect

    click.echo(inspect(settings))
