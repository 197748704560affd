"""`raypp`: the list of commands, and the exit codes of all of them."""

import difflib
import errno
import io
import logging
import sys
import traceback
from collections.abc import Sequence

import click

import raypp
from raypp.cli.output import echo, echo_lines, show_error
from raypp.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_RUN_FAILED, EXIT_USAGE, RayppError, causes, origin_in_words
from raypp.registry import load_object
from raypp.storage.store import bounded_command
from raypp.untrusted.text import VisibleFormatter

_FULL = (errno.ENOSPC, errno.EDQUOT)

FAMILIES = {
    # family: command: (its function below raypp.cli, one line of help); imported on first use,
    # so that `raypp --help` is quick.
    "Runs": {
        "submit": ("run_commands:submit_command", "Train: check a job, submit it to the cluster, follow the run."),
        "status": ("inspect_commands:status_command", "Show a run's state, step, speed, ranks and errors."),
        "list": ("inspect_commands:list_command", "List all runs."),
        "history": ("inspect_commands:history_command", "Print loss and speed of every step as JSON lines."),
        "events": ("inspect_commands:events_command", "Print the events of a run, with their times."),
        "logs": ("inspect_commands:logs_command", "Print the output of the ranks."),
        "timeline": ("timeline_command:timeline_command", "Trace the next steps: who computes, sends and waits when."),
        "tensorboard": ("inspect_commands:tensorboard_command", "Open TensorBoard on a run."),
        "report": ("inspect_commands:report_command", "Write one HTML page about a run, or about two."),
        "save": ("run_commands:save_command", "Save a checkpoint now."),
        "stop": ("run_commands:stop_command", "Stop a run after a final checkpoint."),
        "queue": ("queue_commands:queue_group", "Show who waits for devices and who has them; change the line."),
        "delete": ("run_commands:delete_command", "Delete a run that has ended, with all it has in the store."),
    },
    "Jobs": {
        "init": ("job_commands:init_command", "Write an example job and its data into this directory."),
        "plan": ("plan_command:plan_command", "Show what a job will do and cost. Needs no cluster."),
        "data": ("data_commands:data_group", "Look at a job's data before training; tokenise it once."),
        "parity": ("parity_command:parity_command", "Compare a job's mesh with a single process, number by number."),
        "explain": ("job_commands:explain_command", "Explain the keys of a job file."),
        "schema": ("job_commands:schema_command", "Print the job file's JSON Schema, for editors."),
        "list-kinds": ("job_commands:list_kinds_command", "List the available models, data sources, schedules …"),
    },
    "Models": {
        "generate": ("generate_command:generate_command", "Continue prompts with a trained model."),
        "eval": ("eval_command:eval_command", "Compute a model's loss on text, or run evaluation tasks."),
    },
    "Stores and clusters": {
        "checkpoints": ("checkpoint_commands:checkpoints_group", "List, verify, prune and convert checkpoints."),
        "local": ("cluster_commands:local_group", "Run a cluster on this machine: Ray and an S3 server."),
        "slurm": ("cluster_commands:slurm_command", "Train on the nodes of a Slurm job: start Ray, submit, follow."),
        "doctor": ("doctor_command:doctor_command", "Check a cluster: versions, links, clocks, store."),
    },
}
COMMANDS = {
    name: (f"raypp.cli.{function}", words)
    for commands in FAMILIES.values()
    for name, (function, words) in commands.items()
}


_SAID_ELSEWHERE = {"chat": "generate RUN --chat", "train": "submit JOB", "run": "submit JOB", "ps": "list"}


class LazyCommands(click.Group):
    """A group whose commands are imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = load_object(COMMANDS[cmd_name][0])
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            close = _SAID_ELSEWHERE.get(args[0]) or next(iter(difflib.get_close_matches(args[0], COMMANDS, n=1)), "")
            hint = f"did you mean {close!r}?" if close else "`raypp --help` lists them."
            raise click.UsageError(f"there is no command {args[0]!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        longest = max(map(len, COMMANDS))
        for family, commands in FAMILIES.items():
            with formatter.section(family):
                formatter.write_dl([(name.ljust(longest), words) for name, (_, words) in commands.items()])


@click.group(
    cls=LazyCommands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
    A first run, on this machine:
      raypp init quickstart
      raypp local up
      raypp submit quickstart.yaml
    """,
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error. May also follow the command.")
@click.version_option(raypp.__version__, prog_name="raypp", message="%(prog)s %(version)s")
def cli(debug: bool) -> None:
    """Train a language model across the GPUs of several machines. One YAML file describes a job."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits with its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that lacks a character shows its number
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(VisibleFormatter())  # warnings of libraries, as of botocore
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Runs one command. Returns the exit code: 0 success, 1 the run failed, 2 the job file or the
    arguments are wrong, 3 no cluster or store is reachable, 4 not enough resources, 130
    interrupted. Errors have been printed."""
    arguments, debug = _take_debug(arguments)
    try:
        with bounded_command():
            result = cli.main(args=arguments, prog_name="raypp", standalone_mode=False)
        return result if isinstance(result, int) and not isinstance(result, bool) else EXIT_OK
    except RayppError as error:
        if debug:
            echo_lines(traceback.format_exc(), err=True, nl=False)
        show_error(error)
        return error.exit_code
    except click.ClickException as error:
        text = io.StringIO()
        error.show(text)
        echo_lines(text.getvalue(), err=True, nl=False)
        return EXIT_USAGE
    except (click.Abort, KeyboardInterrupt):
        return _interrupted()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else EXIT_OK if error.code is None else EXIT_RUN_FAILED
    except Exception as error:  # noqa: BLE001 - nothing may escape without a message; --debug shows the traceback
        if any(isinstance(cause, KeyboardInterrupt) for cause in causes(error)):
            return _interrupted()  # an open file that Ctrl-C leaves may fail to close, for instance a zip
        if debug:
            echo_lines(traceback.format_exc(), err=True, nl=False)
        if isinstance(error, OSError) and error.errno in _FULL:
            echo(f"no space is left to write {error.filename or 'the output'}", err=True)
            return EXIT_RUN_FAILED
        words = " ".join(origin_in_words(error).split())
        hint = "" if debug else " (run again with --debug for the traceback)"
        kind = "your own code failed" if raypp.errors.place_in_user_code(error) else "internal error"
        echo(f"{kind}: {words}{hint}", err=True)
        return EXIT_RUN_FAILED


def _interrupted() -> int:
    echo("interrupted", err=True)
    return EXIT_INTERRUPTED


def _take_debug(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Removes `--debug` from anywhere before `--`. Users append it to the command that failed."""
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    rest = [argument for position, argument in enumerate(arguments) if position >= end or argument != "--debug"]
    return rest, len(rest) < len(arguments)
