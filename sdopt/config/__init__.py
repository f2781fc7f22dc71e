"""From a command line to typed, validated configuration: the only room that knows Hydra."""

from sdopt.config.paths import offer_cards

offer_cards()
