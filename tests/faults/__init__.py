"""Faults on purpose: programs killed at random moments, files damaged at random, random calls."""
