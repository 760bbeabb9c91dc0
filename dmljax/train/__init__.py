"""The application: a config becomes a run, and a run becomes files."""
