"""Benchmarks: run one as `python -m tests.benchmarks.init`. They time and weigh; ordinary tests count."""
