"""Random faults: wrong calls, kills and corruptions, each a script with a bounded test."""
