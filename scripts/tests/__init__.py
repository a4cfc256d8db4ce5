"""Tests of scripts/ladder; `scripts/ladder test` runs them."""
