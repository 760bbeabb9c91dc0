"""A config becomes a `Run`: typed options, the registry of names, the files of configs."""
