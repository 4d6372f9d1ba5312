"""What an output dir has, written again: compacted, without ids that were forgotten, or in another place."""
