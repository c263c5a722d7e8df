"""Parts that run underneath: transfers, types, one call of `shard_map`, files. No program imports a name from here."""
