"""From a command line to typed, validated configuration: the only room that knows Hydra."""

from sdopt.config.paths import offer_cards
from sdopt.config.sources import read_marked_files

offer_cards()
read_marked_files()
