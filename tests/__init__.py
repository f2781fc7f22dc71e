"""The tests, which mirror `sdopt/`. What processes and libraries read from the environment is set before they start."""

import os
from pathlib import Path

from sdopt.worker.forkserver import prepare_environment

prepare_environment()
# Of models this small a second thread costs more than it gives, and far more where another process wants the core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Commands in processes of their own, and the fork server, import what this process imports, whatever is installed.
_ROOT = str(Path(__file__).parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join(
    [_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
)
