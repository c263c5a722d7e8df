"""Benchmarks: run one as `python -m tests.benchmarks.init`. They measure; tests assert."""
