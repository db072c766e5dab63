"""Measures this package beside its peers on one machine: ``make bench``."""
