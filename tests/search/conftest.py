"""What tests of searches share."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def few_misses() -> Iterator[None]:
    """Of a handful of combinations it is soon known that none is left: to ask Optuna twenty times takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sdopt.search.trials._MISSES", 3)
        yield
