"""The command line: one file a verb, and the boundary where errors become messages and exit codes.

Exit codes: 0 done, 1 failed, 2 the request is wrong, 130 interrupted. Results go to stdout, everything else to stderr.
Nothing heavy is imported until a verb runs, so ``quantforge --help`` answers at once.
"""

import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Annotated, NoReturn

import typer
import typer.main

from quantforge import __version__
from quantforge.cli.bench import bench
from quantforge.cli.convert import convert
from quantforge.cli.eval import evaluate
from quantforge.cli.flags import FlagCommand
from quantforge.cli.generate import generate
from quantforge.cli.inspect import inspect
from quantforge.cli.plan import plan
from quantforge.cli.quantize import quantize
from quantforge.cli.recipes import recipes
from quantforge.cli.verify import verify
from quantforge.errors import QuantforgeError

app = typer.Typer(
    name="quantforge",
    help="Quantize language models, verify what was written, and measure what it cost.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
app.command("quantize", cls=FlagCommand, short_help="Quantize a checkpoint and verify what was written.")(quantize)
app.command("plan", cls=FlagCommand, short_help="What quantizing a model would give, and which servers take it.")(plan)
app.command("eval", short_help="Perplexity, and KL and top-1 against a reference.")(evaluate)
app.command("inspect", short_help="What a checkpoint holds, and what was left alone.")(inspect)
app.command("convert", short_help="The same weights in another format, exactly.")(convert)
app.command("generate", short_help="Text from a checkpoint, run on its packed weights.")(generate)
app.command("bench", short_help="How fast a checkpoint runs here, against dense models.")(bench)
app.command("verify", short_help="All that is wrong with a checkpoint; --fix repairs a copy.")(verify)
app.add_typer(recipes, name="recipes", short_help="Recipes that come with the package: list, show, copy.")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"quantforge {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Quantize language models, verify what was written, and measure what it cost."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (the process's own when None) and return its exit code; raises nothing.

    A SIGTERM ends the run the way Ctrl-C does, so that it is recorded and can be resumed. Threads that wait for each
    other sleep, unless OMP_WAIT_POLICY says otherwise: on a busy machine spinning costs a large part of the time.
    """
    arguments = sys.argv[1:] if argv is None else argv
    if not {"generate", "bench"} & set(arguments[:1]):  # they wake threads hundreds of times for each token
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded, which no verb has done yet
    if threading.current_thread() is not threading.main_thread():
        return _guarded(argv)
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _guarded(argv)
    finally:
        signal.signal(signal.SIGTERM, previous)


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _guarded(argv: Sequence[str] | None) -> int:
    """Every way a run can end, as an exit code, with a message on stderr when it is not success."""
    try:
        typer.main.get_command(app).main(args=argv, prog_name="quantforge")
        return 0
    except SystemExit as ending:  # typer's own: help, version, usage errors, Ctrl-C
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        if code == 130:
            _say("interrupted")
        return code
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except QuantforgeError as error:
        _say(f"error: {error}")
        return error.exit_code
    except Exception as error:
        if (full := _disk_full(error)) is not None:
            _say(f"error: the disk is full{full}; free some space and run the same command again")
        elif isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            _say(f"error: {error.strerror}: {error.filename}")
        else:
            traceback.print_exc()
            _say(f"error: unexpected {type(error).__name__}: {error}\nthis is a defect of quantforge; see above")
        return 1


def _disk_full(error: BaseException | None) -> str | None:
    """``" while writing <path>"``, or "" when the path is unknown, if the disk being full is behind `error`."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f" while writing {error.filename}" if error.filename else ""
        if "No space left on device" in str(error):  # libraries in other languages report it as text
            return ""
        error = error.__cause__ or error.__context__
    return None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
