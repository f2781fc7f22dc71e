"""One thin file per command: `sdopt <command>` and `python -m runners.<command>` do the same.

A command parses, calls one function of `sdopt`, and prints.
"""

import os
import sys
import traceback
from collections.abc import Callable
from functools import wraps


def end_with_code(main: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """Turns what a command raises into a line for each problem and an exit code.

    2 for a mistake of the user's, 3 for what cannot be had or done, 130 for Ctrl-C. `HYDRA_FULL_ERROR=1` shows the
    traceback as well.
    """

    @wraps(main)
    def command(argv: list[str]) -> int:
        from sdopt.errors import UnavailableError, UsageError

        try:
            return main(argv)
        except (UsageError, UnavailableError) as error:
            if os.environ.get("HYDRA_FULL_ERROR") == "1":
                traceback.print_exc()
            for problem in error.problems:
                print(f"sdopt: {problem}", file=sys.stderr)
            return error.exit_code
        except KeyboardInterrupt:
            print("sdopt: interrupted", file=sys.stderr)
            return 130
        except Exception:
            # A mistake of sdopt's own. Python would end with 1, which means that a gate failed.
            traceback.print_exc()
            return 3

    return command
