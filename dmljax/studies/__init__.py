"""Many runs compared honestly: a study file names them, workers make them, a table compares them.

study_file.py   a study file as typed data, and its mistakes
plan.py         the runs of a study: their commands and digests
folder.py       the folder of a study: its index, and what may change later
session.py      the verbs of `dmljax study`, for a study that is opened with its folder
worker.py       the loop that makes runs; `launch.py` starts several workers
outcomes.py     the state of a run
joined.py       ensembles of trained nets;  sizes.py  parameters and operations of the nets
search.py       trials and the best of them;  space.py  ranges and points;  engine.py  Optuna
table.py        outcomes as a table: means, intervals, tests; `printing.py` and `page.py` show it
"""
