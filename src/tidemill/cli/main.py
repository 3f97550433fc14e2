"""`tidemill COMMAND`: finds the command, runs it, and ends a failure with what failed, why, and what to type."""

from __future__ import annotations

import sys
import traceback
from importlib import import_module

import click

from tidemill import __version__
from tidemill.errors import TidemillError

# Summaries stand here so that --help imports no command.
COMMANDS = {
    "serve": "Serve a model over HTTP, OpenAI-compatible.",
    "chat": "Talk to a model in the terminal.",
    "complete": "Continue a text, streaming to the terminal.",
    "models": "List, fetch, locate and remove models.",
    "quantize": "Round a model to fewer bits and write it to a folder.",
}

EXAMPLES = """\b
Examples:
  tidemill serve                        the default model on http://127.0.0.1:8000
  tidemill serve ./my-model --port 9000
  tidemill chat                         talk to the default model, no server needed
  tidemill complete "Once upon a time"
"""


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = import_module(f"tidemill.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, help=f"An inference and serving engine for open models.\n\n{EXAMPLES}")
@click.version_option(__version__, prog_name="tidemill")
def app() -> None:
    pass


def main() -> None:
    try:
        code = app(standalone_mode=False)
    except TidemillError as error:
        sys.exit(f"\n{error.report()}")
    except click.Abort:
        sys.exit(130)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except Exception as error:
        traceback.print_exc()
        unexpected = TidemillError(
            "tidemill failed in a way it did not foresee",
            cause=f"{type(error).__name__}: {error}",
            fix="report it with the lines above; TIDEMILL_LOG_LEVEL=debug tells more",
        )
        sys.exit(f"\n{unexpected.report()}")
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
