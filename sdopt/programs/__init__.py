"""The program that uses a measured variant: how it is written, and how it is run before anybody sees it."""
