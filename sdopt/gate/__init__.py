"""The quality gate: rules fixed beforehand, applied to what a study measured."""
