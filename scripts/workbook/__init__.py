"""Implementation of scripts/ladder.  Only the standard library is imported until a command needs more."""
