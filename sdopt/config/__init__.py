"""From a command line to typed, validated configuration: the only room that knows Hydra."""
