"""The tests, which mirror `sdopt/`. What libraries read from the environment when imported is set before they are."""

from sdopt.forkserver import prepare_environment

prepare_environment()
