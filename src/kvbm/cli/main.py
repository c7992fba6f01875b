"""Entry point of the `kvbm` command.

A subcommand is a module with `NAME`, `HELP`, `add_arguments` and `run`, listed in `COMMANDS`. The help text needs all
of them, so a module imports heavy packages (an engine, torch, numpy, rich) inside `run`.
"""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import Protocol

import kvbm
from kvbm.cli import bench, cache, config, control, doctor, serve, simulate, size, top
from kvbm.config import ConfigError


class Command(Protocol):
    """The contract of a subcommand's module. Its docstring is the text of `kvbm NAME --help`."""

    __doc__: str | None
    NAME: str
    HELP: str

    # A module with `PASSES_ON = True` finds undeclared arguments in `args.rest`, and the command line in `args.argv`.

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int:
        """Return the exit code: 0 for success. A `ConfigError` is printed, and the exit code is 2."""
        ...


COMMANDS: tuple[Command, ...] = (serve, size, config, doctor, top, cache, bench, simulate, control)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvbm",
        description="KVBM keeps KV cache blocks that an LLM engine evicts from the GPU.",
        epilog="`kvbm COMMAND --help` describes a command.",
    )
    parser.add_argument("--version", action=_Version, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        subparser = commands.add_parser(
            command.NAME,
            help=command.HELP,
            description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=not _passes_on(command),
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run, passes_on=_passes_on(command), refuse=subparser.error)
    return parser


def _passes_on(command: Command) -> bool:
    return bool(getattr(command, "PASSES_ON", False))


def main(argv: Sequence[str] | None = None) -> int:
    if sys.platform != "linux":
        print(f"kvbm: {kvbm.LINUX_ONLY} (this is {sys.platform})", file=sys.stderr)
        return 2
    for stream in (sys.stdout, sys.stderr):  # a terminal or a log may have no arrows and boxes
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    parser = build_parser()
    argv = sys.argv[1:] if argv is None else argv
    args, rest = parser.parse_known_args(argv)
    args.argv, args.rest = argv, rest
    if rest and not getattr(args, "passes_on", False):
        refuse = getattr(args, "refuse", parser.error)  # with the usage of the command, where there is one
        refuse(f"unrecognized arguments: {' '.join(rest)}")
    if not hasattr(args, "run"):
        parser.print_help(sys.stderr)
        return 2
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except ConfigError as error:
        print(f"kvbm: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader, for example `head`, has closed the pipe. The interpreter flushes the rest to /dev/null at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


class _Version(argparse.Action):
    """argparse's own action needs the text in advance, and the lookup takes longer than the rest of the start."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"kvbm {kvbm.__version__}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
